"""Probes: the rewards that training would see, whatever the batch, and the pictures of them."""

import math

import pytest
import torch

from sfgrpo.config import GRPOConfig
from sfgrpo.kernels import Kernel
from sfgrpo.loop import StepwiseGRPO
from sfgrpo.pictures import GAP, TILE
from sfgrpo.probe import probe
from sfgrpo.probe_pictures import GAIN, LOSS, Board, draw_plot
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.schedule import even_sigmas
from sfgrpo.scoring import Scorer

SHAPE = (3, 4, 4)
PROMPTS = [Prompt("warm", metadata={"sign": 1.0}), Prompt("cold", metadata={"sign": -1.0})]
SIGMAS = even_sigmas(5, shift=2.0)
MEMBERS = 3


class Policy:
    """A fixed nonlinear velocity that depends on the prompt; counts the rows that it is given."""

    def __init__(self):
        self.rows, self.decoded = 0, 0
        self.weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(1)) / 5

    def velocity(self, x, sigma, cond):
        self.rows += len(x)
        push = (cond.float() - 0.5 + sigma).view(-1, 1)
        return torch.tanh(x.flatten(1) @ self.weight + push).view_as(x)

    def decode(self, latents):
        self.decoded += len(latents)
        return torch.sigmoid(2 * latents)


def score(images, prompts, metadata):
    sign = torch.tensor([m["sign"] for m in metadata])
    assert [p == "warm" for p in prompts] == (sign > 0).tolist()
    red, contrast = images[:, 0].mean((1, 2)), images.flatten(1).std(1)
    return Scores(sign * red + 0.3 * contrast, {"red": red, "contrast": contrast})


def run(policy=None, **changed):
    options = {
        "sigmas": SIGMAS,
        "latent_shape": SHAPE,
        "kernel": Kernel(),
        "members": MEMBERS,
        "substeps": 2,
        "seed": 7,
    }
    return probe(policy or Policy(), score, PROMPTS, **(options | changed))


@pytest.mark.parametrize("substeps", (1, 3))
@pytest.mark.parametrize("kernel", ("ddim", "flow_grpo"))
def test_rewards_are_those_of_the_first_iteration_of_a_training(kernel, substeps):
    result = run(kernel=Kernel(name=kernel), substeps=substeps)
    loop = StepwiseGRPO(
        Policy(),
        score,
        None,
        sigmas=SIGMAS,
        latent_shape=SHAPE,
        config=GRPOConfig(group_size=MEMBERS, kernel=Kernel(name=kernel), substeps=substeps),
        seed=7,
    )
    trajectory, cond = loop.sample(0, [0, 1])
    latents, states = loop._estimate(trajectory, cond)
    asked = [PROMPTS[r // MEMBERS] for r in states.row.tolist()]
    scorer = Scorer(Policy(), score, 8, len(latents))
    scorer.add(latents, asked, states.state == trajectory.steps)
    scores = scorer.finish()
    torch.testing.assert_close(result.trajectory.latents, trajectory.latents, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.rewards.flatten(0, 1), scores.total[states.index], rtol=0, atol=1e-6)
    for name in ("red", "contrast"):
        torch.testing.assert_close(
            result.parts[name].flatten(0, 1), scores.parts[name][states.index], rtol=0, atol=1e-6
        )


def test_one_step_estimates_by_hand():
    policy = Policy()
    result = run(policy, substeps=1)
    assert result.rewards.shape == (2, MEMBERS, 6) and result.gains.shape == (2, MEMBERS, 5)
    for k in range(6):
        x = result.trajectory.latents[:, k]
        t = SIGMAS[k]
        v = policy.velocity(x, t.expand(len(x)), torch.tensor([0, 0, 0, 1, 1, 1]))
        image = torch.sigmoid(2 * (x - t * v))
        sign = torch.tensor([1.0] * 3 + [-1.0] * 3)
        expected = sign * image[:, 0].mean((1, 2)) + 0.3 * image.flatten(1).std(1)
        torch.testing.assert_close(result.rewards[..., k].flatten(), expected, rtol=0, atol=1e-6)


def test_gains_telescope_and_groups_share_their_start():
    result = run()
    torch.testing.assert_close(result.gains.sum(-1), result.rewards[..., -1] - result.rewards[..., 0])
    torch.testing.assert_close(result.gains[..., -1], torch.zeros(2, MEMBERS), rtol=0, atol=1e-6)
    assert (result.rewards[..., 0] == result.rewards[:, :1, 0]).all()
    assert (result.rewards[..., 2:].std(1) > 1e-4).all()
    assert not torch.equal(result.rewards[0, 0], result.rewards[1, 0])


@pytest.mark.parametrize("kernel", (Kernel(name="ode"), Kernel(name="ddim", eta=0.0)))
def test_without_noise_all_members_are_one(kernel):
    policy = Policy()
    result = run(policy, kernel=kernel, substeps=1)
    assert (result.rewards == result.rewards[:, :1]).all() and (result.gains.abs() > 1e-5).any()
    assert policy.rows == 2 * 5 and policy.decoded == 2 * 6  # computed once a group
    alone = run(kernel=kernel, substeps=1, members=1)
    torch.testing.assert_close(alone.rewards, result.rewards[:, :1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", (1, 4, 100))
def test_the_batch_does_not_matter(batch):
    torch.testing.assert_close(run(batch=batch).rewards, run(batch=8).rewards, rtol=0, atol=1e-6)


def test_the_seed_decides():
    assert torch.equal(run().rewards, run().rewards)
    assert not torch.equal(run().rewards, run(seed=8).rewards)


@pytest.mark.parametrize("substeps", (1, 2, 4, 50))
@pytest.mark.parametrize("members", (1, 3))
def test_progress_counts_every_row_of_work(substeps, members):
    told, policy = [], Policy()
    run(policy, members=members, substeps=substeps, batch=2, on_progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {policy.rows + policy.decoded}
    done = [d for d, _ in told]
    assert done == sorted(done) and done[0] == 0 and done[-1] == told[0][1] and done[-2] < done[-1]


def test_progress_can_stop_it():
    class Cancel(BaseException):
        pass

    def stop(done, total):
        if done > 5:
            raise Cancel

    with pytest.raises(Cancel):
        run(on_progress=stop)


def test_a_grid_that_starts_late_starts_from_less_noise():
    late = run(sigmas=torch.tensor([0.5, 0.25, 0.0]))
    torch.testing.assert_close(late.trajectory.latents[:, 0], 0.5 * run().trajectory.latents[:, 0])
    with pytest.raises(ValueError, match="end at exactly 0"):
        run(sigmas=torch.tensor([1.0, 0.5]))


def collected(**options):
    """(result, board) of a run whose images went onto a board."""
    board = Board([p.text for p in PROMPTS], options.get("members", MEMBERS), SIGMAS)
    return run(on_images=board.add, batch=4, **options), board


def test_every_image_comes_once_with_its_score():
    seen = {}

    def take(states, part, images, scores):
        for m, image, value in zip(range(part.start, part.stop), images, scores.tolist(), strict=True):
            assert m not in seen
            seen[m] = (image, value)

    result = run(on_images=take, batch=4)
    assert sorted(seen) == list(range(len(result.states.row)))
    for m, (image, value) in seen.items():
        prompt = PROMPTS[int(result.states.row[m]) // MEMBERS]
        assert value == pytest.approx(float(score(image[None], [prompt.text], [prompt.metadata]).total), abs=1e-6)
    assert result.rewards.flatten(0, 1)[4, 3] == pytest.approx(seen[int(result.states.index[4, 3])][1])


def sheet_pixels(picture) -> torch.Tensor:
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)


def test_the_board_has_a_row_a_trajectory_and_a_column_a_state():
    images = {}

    def take(states, part, decoded, scores):
        board.add(states, part, decoded, scores)
        images.update(zip(range(part.start, part.stop), decoded, strict=True))

    board = Board([p.text for p in PROMPTS], MEMBERS, SIGMAS)
    result = run(on_images=take, batch=4)
    pixels = sheet_pixels(board.draw())

    def block(row, state):
        image = (images[int(result.states.index[row, state])] * 255).round().byte().movedim(0, -1)
        return image.repeat_interleave(TILE // 4, 0).repeat_interleave(TILE // 4, 1)

    def place(part):
        """(y, x) where the board shows these pixels, once or as the last two: the last step goes to its estimate."""
        corners = (pixels == part[0, 0]).all(-1).nonzero().tolist()
        found = [(y, x) for y, x in corners if torch.equal(pixels[y : y + TILE, x : x + TILE], part)]
        assert len(found) <= 2 and len({y for y, _ in found}) == 1
        return found[-1]

    finals = [place(block(row, 5)) for row in range(2 * MEMBERS)]
    assert len({x for _, x in finals}) == 1 and [y for y, _ in finals] == sorted({y for y, _ in finals})
    for row, (y, right) in enumerate(finals):
        for state in range(6):
            x = right - (5 - state) * (TILE + GAP)
            assert torch.equal(pixels[y : y + TILE, x : x + TILE], block(row, state))


def test_the_largest_gain_and_the_largest_loss_have_their_colour():
    result, board = collected()
    pixels = sheet_pixels(board.draw())
    gains = result.gains.flatten()
    most = gains[gains.abs().argmax()]
    shown = GAIN if most > 0 else LOSS
    area = (pixels == torch.tensor(shown, dtype=torch.uint8)).all(-1).sum()
    assert int(area) > TILE * 20


def test_a_board_that_is_not_full_is_drawn_all_the_same():
    board, sizes = Board([p.text for p in PROMPTS], MEMBERS, SIGMAS), []

    def take(states, part, images, scores):
        board.add(states, part, images, scores)
        sizes.append(board.draw().size)

    run(on_images=take, batch=4)
    assert len(sizes) > 5 and len(set(sizes)) == 1


def test_a_board_shows_so_many_trajectories_at_most_and_shrinks_large_images():
    _, board = collected(members=20)
    many = board.draw()
    _, few = collected(members=16)
    assert many.height < 1.3 * few.draw().height  # one prompt of 20 rows and a line, against two of 16
    big = Board(["a"], 1, torch.linspace(1, 0, 21))
    states = run(members=1).states
    states.index = torch.arange(21).view(1, -1)
    big.add(states, slice(0, 21), torch.rand(21, 3, 600, 1200), torch.rand(21))
    assert 3900 < big.draw().width < 4300


@pytest.mark.parametrize("members, prompts", ((1, 1), (3, 2), (2, 8)))
def test_the_plot_is_drawn_for_any_number(members, prompts):
    texts = [Prompt(f"warm {n}") for n in range(prompts)]

    def reward(images, names, metadata):
        total = images.mean((1, 2, 3))
        total[0] = math.nan
        return Scores(total, {"mean": total})

    result = probe(
        Policy(), reward, texts, sigmas=SIGMAS, latent_shape=SHAPE, kernel=Kernel(), members=members, batch=50
    )
    picture = draw_plot(result, [p.text for p in texts])
    assert picture.width == 960 and len(picture.getcolors(1 << 20)) > 20
