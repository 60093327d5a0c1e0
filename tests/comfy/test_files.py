"""Names, files and settings that the train node refuses: one sentence, before it trains, and nothing is written."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.comfy.training import Graph

NAMES = {
    "parent": "../x",
    "folder": "a/b",
    "absolute": "/abs",
    "windows folder": "a\\b",
    "drive": "C:x",
    "nul character": "a\0b",
    "line feed": "a\nb",
    "right to left": "a\u202egnp.b",
    "half a character": "a\ud800",
    "reserved": "CON",
    "reserved with an ending": "nul.txt",
    "reserved with a space": "aux .txt",
    "reserved port": "COM\u00b9",
    "empty": "",
    "blank": "  ",
    "dots": "..",
    "hidden": ".x",
    "dot at its end": "x.",
    "long": "n" * 300,
    "long in bytes": "\U0001f642" * 100,
    "pattern": "%date%",
    "wild card": "a*",
}


@pytest.fixture
def graph(server) -> Graph:
    return Graph(server)


def files(server) -> set[Path]:
    return {path for path in server.base.rglob("*") if path.is_file()}


def refused(server, graph: Graph) -> str:
    """The words with which a training is refused; it must not have begun, and no file is new."""
    shown = []
    before = files(server)
    outcome = server.watch(graph.nodes, shown.append)
    assert outcome.status == "error"
    assert files(server) == before
    assert not [text for text in shown if "sample" in text]
    assert "\n" not in outcome.error
    return outcome.error


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_name(server, graph, name):
    graph.train(name=name)
    words = refused(server, graph)
    assert words.startswith("the name ")
    assert "choose another" in words or "give a plain file name" in words


def test_a_name_in_other_letters(server, graph):
    graph.train(name="Формы 形 \u00e9", iterations=1)
    assert graph.run().place() == "output/loras/Формы 形 \u00e9_00001_last.safetensors"
    assert (server.output / "loras" / "Формы 形 \u00e9_00001_last.safetensors").is_file()


@pytest.mark.parametrize("field", ("prompt_file", "continue_from"))
@pytest.mark.parametrize("value", ("../secret.txt", "/etc/passwd", "missing.jsonl", "secret.txt\0.safetensors"))
def test_a_file_that_is_not_in_the_list(server, graph, field, value):
    (server.base / "secret.txt").write_text("a secret\n", encoding="utf-8")
    graph.train(**{field: value} | ({"prompts": ""} if field == "prompt_file" else {}))
    with pytest.raises(ValueError, match="not in list") as refusal:
        server.queue(graph.nodes)
    assert field in str(refusal.value)
    # A link is not compared with the list, so that the node has to do it.
    graph.nodes["train"]["inputs"][field] = graph.add("any", "Probe_Any", text=value)
    words = refused(server, graph)
    assert "choose one of the list" in words
    assert "a secret" not in words


def put(server, name: str, data: bytes) -> str:
    """Write a file of the input folder, or of the loras folder for a LoRA; returns its name."""
    folder = server.base / "models" / "loras" if name.endswith(".safetensors") else server.input
    (folder / name).write_bytes(data)
    return name


PROMPT_FILES = {
    "empty": ("no.txt", b"\n \n", "prompt file no.txt is empty; write at least one prompt"),
    "not JSON": ("bad.jsonl", b'{"prompt": "a"}\n{"prompt"', "bad.jsonl, line 2: not JSON"),
    "no prompt": ("odd.jsonl", b'{"text": "a"}', 'odd.jsonl, line 1: has text; needs "prompt", a non-empty string'),
    "not text": ("not.txt", b"\xff\xfe\x00", "prompt file not.txt cannot be read as UTF-8 text"),
}


@pytest.mark.parametrize("file", PROMPT_FILES.values(), ids=PROMPT_FILES)
def test_a_prompt_file_without_prompts(server, graph, file):
    name, data, expected = file
    graph.train(prompts="", prompt_file=put(server, name, data))
    words = refused(server, graph)
    assert expected in words
    assert str(server.base) not in words


def test_a_prompt_file_in_capitals(server, graph):
    graph.train(prompts="", prompt_file=put(server, "CAPITALS.TXT", b"two circles\r\n"), iterations=1)
    assert graph.run().place()


def test_a_damaged_lora(server, graph):
    graph.train(continue_from=put(server, "damaged.safetensors", b"no safetensors at all"))
    assert refused(server, graph).startswith("LoRA file damaged.safetensors cannot be read: ")


def test_a_lora_of_other_shapes(server, graph):
    graph.train(layers="attention", iterations=1, name="whole")
    lora = graph.run().lora()
    for name, change, words in (
        (
            "half.safetensors",
            {key: value for key, value in lora.items() if "lora_A" in key},
            "lacks one of the two factors of transformer.transformer_blocks.0.attn.",
        ),
        (
            "wide.safetensors",
            {key: value.repeat(1, 2) if "lora_A" in key else value for key, value in lora.items()},
            "is for a model of another width than transformer.transformer_blocks.0.attn.",
        ),
        ("empty.safetensors", {}, "LoRA file empty.safetensors holds no LoRA: it is empty"),
    ):
        save_file({k: v.contiguous() for k, v in change.items()}, server.base / "models" / "loras" / name)
        again = Graph(server)
        again.train(continue_from=name)
        assert words in refused(server, again)


SETTINGS = {
    "size": ({"width": 30}, "width and height must be multiples of 4 with this VAE, got 30 x 32"),
    "no prompts": ({"prompts": " \n"}, "write at least one prompt, one a line, or choose a prompt_file"),
    "no noise": ({"eta": 0.0}, "kernel must be stochastic: ode or eta 0 leaves nothing to train on"),
    "window": ({"window_start": 3, "window_end": 2}, "its start is 3, its end 2, and there are 4 steps"),
    "window after the end": ({"window_start": 12}, "its start is 12, its end 4, and there are 4 steps"),
    "updates": ({"updates": 3}, "updates 3 is more than prompts_per_iteration 2"),
    "window size": ({"window_size": 5}, "window_size 5 is more than the 4 steps of the window"),
    "no clip": ({"clip": None}, "connect a CLIP, or ready CONDITIONING in its place"),
}


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_settings(server, graph, case):
    settings, expected = case
    graph.train(**settings)
    assert expected in refused(server, graph)


def test_a_vae_of_other_latents(server, graph):
    graph.train(vae=graph.add("pixels", "VAELoader", vae_name="pixel_space"))
    expected = (
        "this VAE decodes latents of 3 channels, and those of this MODEL (SD3) have 16; connect the VAE that belongs"
    )
    assert refused(server, graph).startswith(expected)


def test_a_lora_of_other_layers(server, graph):
    graph.train(layers="attention", iterations=1, name="layers")
    save_file(graph.run().lora(), server.base / "models" / "loras" / "attention.safetensors")
    again = Graph(server)
    # Without a CLIP: it is found before prompts are encoded.
    again.train(layers="all", continue_from="attention.safetensors", clip=None)
    words = refused(server, again)
    assert words.startswith("the LoRA to continue from is for other layers than layers = all (first difference: transf")
    assert words.endswith("; set layers to attention")


def test_text_and_file(server, graph):
    graph.train(prompt_file=put(server, "some.txt", b"two crosses\n"))
    expected = "prompts come from the text or from prompt_file, not both; empty one of the two"
    assert refused(server, graph) == expected


def test_group_of_one(server, graph):
    graph.train(group_size=1)
    with pytest.raises(ValueError, match="Value 1 smaller than min of 2"):
        server.queue(graph.nodes)
    graph.nodes["train"]["inputs"]["group_size"] = graph.add("one", "PrimitiveInt", value=1)
    assert refused(server, graph).startswith("group_size must be 2 or more")


def test_a_reward_that_cannot_read_a_prompt(server, graph):
    graph.train(reward=graph.add("picky", "Probe_PickyReward"))
    assert refused(server, graph) == "the prompt 'a blue square' has no circle; this reward needs one"
    graph.train(reward=graph.add("shapes", "SFGRPO_ShapesReward", mode="soft"), prompts="a dragon\na circle")
    assert "'a dragon'" in refused(server, graph)


@pytest.mark.parametrize("config", ("SD15", "SDXL", "Stable_Cascade_C"))
def test_a_model_that_is_no_flow_model(server, graph, config):
    graph.train(model=graph.add("bare", "Probe_BareModel", config=config))
    assert "is not a flow-matching model; connect one like SD3.5, FLUX" in refused(server, graph)


def conditioned(graph: Graph, kind: str, **inputs) -> list:
    """The conditioning of one text after a stock node."""
    text = graph.add("one text", "CLIPTextEncode", clip=graph.clip, text="two circles")
    return graph.add("changed", kind, conditioning=text, **inputs)


CONDITIONING = {
    "mask": ("ConditioningSetMask", {"strength": 1.0, "set_cond_area": "default"}, "a mask"),
    "area": ("ConditioningSetArea", {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0}, "an area"),
    "timesteps": ("ConditioningSetTimestepRange", {"start": 0.0, "end": 0.5}, "a timestep range"),
}


@pytest.mark.parametrize("case", CONDITIONING.values(), ids=CONDITIONING)
@pytest.mark.parametrize("side", ("positive", "negative"))
def test_conditioning_that_is_more_than_text(server, graph, case, side):
    kind, inputs, what = case
    if "mask" in kind.lower():
        inputs = inputs | {"mask": graph.add("mask", "SolidMask", value=1.0, width=32, height=32)}
    graph.train(prompts="two circles", guidance=2.0, **{side: conditioned(graph, kind, **inputs)})
    assert refused(server, graph) == (
        f"{side} conditioning with {what} is not supported here; connect plain text conditioning"
    )


def test_too_few_conditionings(server, graph):
    graph.train(positive=graph.add("one text", "CLIPTextEncode", clip=graph.clip, text="two circles"))
    assert refused(server, graph).startswith("positive holds conditioning for 1 prompt, and prompts has 2; write ")


def test_guidance_without_a_negative(server, graph):
    one = graph.add("one text", "CLIPTextEncode", clip=graph.clip, text="two circles")
    graph.train(positive=one, prompts="two circles", clip=None, guidance=2.0)
    expected = "guidance above 1 needs a negative; connect negative or CLIP, or set guidance to 1"
    assert refused(server, graph) == expected
