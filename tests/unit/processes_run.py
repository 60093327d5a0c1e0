"""One of several processes of `test_processes.py`: iterations of the tiny policy, for each case of a list.

python processes_run.py ROOT RANK SIZE RENDEZVOUS CASES.json OUT.pt
"""

import json
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])

from sfgrpo.evaluate import evaluate
from sfgrpo.processes import Processes
from tests.unit.test_loop import PROMPTS, SHAPE, SIGMAS, TinyPolicy, score, trained


def run(case: dict, processes: Processes) -> dict:
    """Parameters, metrics and rewards after two iterations with Adam, and an evaluation."""
    settings = dict(case)
    index = [n % len(PROMPTS) for n in range(settings.pop("prompts"))]
    policy = TinyPolicy(0.3)
    _, result, _ = trained(
        index,
        policy=policy,
        iterations=2,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        processes=processes,
        **settings,
    )
    evaluation = evaluate(
        policy,
        PROMPTS,
        range(len(PROMPTS)),
        score,
        sigmas=SIGMAS,
        latent_shape=SHAPE,
        images_per_prompt=2,
        grid=5,
        batch=3,
        device=torch.device("cpu"),
        processes=processes,
    )
    return {
        "parameters": policy.flat(),
        "rewards": result.rewards,
        "metrics": {k: v for k, v in result.metrics.items() if not k.startswith("seconds/")},
        "evaluation": vars(evaluation),
    }


if __name__ == "__main__":
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=size)
    with open(sys.argv[5]) as file:
        cases = json.load(file)
    torch.save([run(case, Processes.current()) for case in cases], f"{sys.argv[6]}.{rank}")
    if size > 1:
        dist.destroy_process_group()
