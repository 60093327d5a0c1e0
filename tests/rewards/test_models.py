"""What all rewards that are models share: batches, devices, dtypes, offload, files, errors."""

import os
import pickle
import shutil

import pytest
import torch

from sfgrpo.rewards import check_prompts, combine, get_reward, mix
from sfgrpo.rewards.models import find_file, linear_head, read_weights
from tests.rewards.small import IMAGE, PROMPTS, images, save_clip


def reward_at(folder, **settings):
    return get_reward("clip_score", model=str(folder), device="cpu", **settings)


def test_nothing_loads_before_the_first_call_and_once_after(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    reward = reward_at(folder)
    first = reward(images(IMAGE, IMAGE), PROMPTS)
    shutil.rmtree(folder)
    assert torch.equal(reward(images(IMAGE, IMAGE), PROMPTS), first)
    reward.free()
    with pytest.raises(ValueError, match=r"folder .*clip \(model\) does not exist"):
        reward(images(IMAGE, IMAGE), PROMPTS)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_scores_do_not_depend_on_the_batch(clip_folder, batch_size):
    reward = reward_at(clip_folder, batch_size=batch_size)
    batch = images(40, 40)
    together = reward(batch, PROMPTS)
    alone = torch.cat([reward(batch[i : i + 1], PROMPTS[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    order = [3, 1, 4, 0, 2]
    torch.testing.assert_close(reward(batch[order], [PROMPTS[i] for i in order]), together[order], rtol=0, atol=1e-6)
    assert float(together.std()) > 1e-3


def test_a_broken_image_leaves_the_others_alone(clip_folder):
    batch = images(40, 40)
    whole = reward_at(clip_folder)(batch, PROMPTS)
    batch[2, 1, 20, 20] = float("nan")
    scores = reward_at(clip_folder)(batch, PROMPTS)
    assert scores.isnan().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(scores[[0, 1, 3, 4]], whole[[0, 1, 3, 4]], rtol=0, atol=1e-6)


def test_float_images_score_as_their_8_bit_files(clip_folder):
    exact = images(IMAGE, IMAGE, steps=0)
    rounded = (exact * 255).round() / 255
    reward = reward_at(clip_folder)
    assert not torch.equal(exact, rounded)
    assert torch.equal(reward(exact, PROMPTS), reward(rounded, PROMPTS))
    assert torch.equal(reward(exact.double(), PROMPTS), reward(rounded, PROMPTS))


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_used_and_near(clip_folder, dtype, expected):
    reward = reward_at(clip_folder, dtype=dtype)
    batch = images(IMAGE, IMAGE)
    exact, rough = reward_at(clip_folder)(batch, PROMPTS), reward(batch, PROMPTS)
    assert rough.dtype == torch.float32
    assert {p.dtype for p in reward._ready()[1].parameters()} == {expected}
    assert 0 < float((rough - exact).abs().max()) < 0.05 < float(exact.max() - exact.min())


def test_a_head_stays_float32(tmp_path):
    save_clip(tmp_path / "clip", projection=32)
    torch.save({f"layers.{k}": v for k, v in linear_head(32).state_dict().items()}, tmp_path / "head.pth")
    reward = get_reward("aesthetic", head=str(tmp_path / "head.pth"), model=str(tmp_path / "clip"), dtype="bf16")
    assert reward(images(IMAGE, IMAGE), PROMPTS).isfinite().all()
    model = reward._ready()[1]
    assert model.head[0].weight.dtype == torch.float32 and model.projection.weight.dtype == torch.bfloat16


def test_no_gradients(clip_folder):
    batch = images(IMAGE, IMAGE).requires_grad_(True)
    reward = reward_at(clip_folder)
    assert not reward(batch, PROMPTS).requires_grad
    assert not any(p.requires_grad for p in reward._ready()[1].parameters()) and not reward._ready()[1].training


@pytest.mark.gpu
def test_offload_rests_on_the_cpu(clip_folder):
    batch = images(40, 40)
    on_cpu = reward_at(clip_folder)(batch, PROMPTS)
    for offload in (False, True):
        reward = get_reward("clip_score", model=str(clip_folder), device="cuda", offload=offload)
        scores = reward(batch.cuda(), PROMPTS)
        assert scores.device.type == "cpu"
        torch.testing.assert_close(scores, on_cpu, rtol=0, atol=1e-3)
        assert reward._kept["model"].dtype == torch.float32
        assert reward._kept["model"].device.type == ("cpu" if offload else "cuda")
    assert get_reward("clip_score", model=str(clip_folder))(batch, PROMPTS).shape == (5,)


def test_weights_may_be_a_bin_file(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "bin")
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    batch = images(IMAGE, IMAGE)
    assert torch.equal(reward_at(folder)(batch, PROMPTS), reward_at(clip_folder)(batch, PROMPTS))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil_was_here",)


def test_a_pickle_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("evil.pth", "wb") as file:
        pickle.dump(Evil(), file)
    torch.save({"layers.0.weight": Evil()}, "evil.pt")
    for name in ("evil.pth", "evil.pt"):
        with pytest.raises(ValueError, match=rf"file {name} \(head\) holds no weights that can be read: ") as error:
            read_weights("head", name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "evil_was_here").exists()


def test_files_that_are_no_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"text")
    (tmp_path / "b.pth").write_bytes(b"")
    torch.save({"epoch": 3}, tmp_path / "c.pth")
    torch.save([torch.zeros(2)], tmp_path / "d.pth")
    for name in ("a.safetensors", "b.pth", "c.pth", "d.pth"):
        with pytest.raises(ValueError, match=rf"file .*{name} \(head\) holds no weights") as error:
            read_weights("head", str(tmp_path / name))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"\(head\) does not exist"):
        read_weights("head", str(tmp_path))


def test_files_on_the_hub_have_three_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file("head", "owner/name/a+b-l14.pth") == ("owner/name", "a+b-l14.pth")
    assert find_file("head", "owner/name/sub/x.pt") == ("owner/name", "sub/x.pt")
    for wrong in ("x.pth", "folder/x.pth", "/a/b/x.pth", "./a/b/x.pth", "../a/x.pth", ""):
        with pytest.raises(ValueError, match=r"\(head\) does not exist"):
            find_file("head", wrong)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "x.pth").write_text("x")
    assert find_file("head", "owner/name/x.pth").is_file()


def wrong_folders(clip_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"model_type": "bert"}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no_such_type"}')
    bare = shutil.copytree(clip_folder, tmp_path / "no_tokenizer")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (bare / name).unlink()
    return {
        tmp_path / "none": r"folder .*none \(model\) does not exist",
        tmp_path / "file": r"model .*file is a file; give the folder of a transformers model, or a hub id",
        tmp_path / "empty": r"folder .*empty \(model\) has no config.json; give that of a transformers model",
        broken: r"model .*broken is no transformers model that can be had: ",
        bert: r"model .*bert is a model of type bert; a clip model is needed",
        bare: r"model .*no_tokenizer has no tokenizer that can be had: ",
    }


def test_wrong_folders_are_named_by_check_and_by_the_call(clip_folder, tmp_path):
    for folder, message in wrong_folders(clip_folder, tmp_path).items():
        reward = reward_at(folder)
        for call in (reward.check, lambda reward=reward: reward(images(IMAGE, IMAGE), PROMPTS)):
            with pytest.raises(ValueError, match=message) as error:
                call()
            assert "\n" not in str(error.value)


def test_weights_that_are_missing_are_not_invented(clip_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(clip_folder, tmp_path / "part")
    state = load_file(folder / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model .*part lacks the weight visual_projection\.weight"):
        reward_at(folder)(images(IMAGE, IMAGE), PROMPTS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the weights of model .*part cannot be loaded: "):
        reward_at(folder)(images(IMAGE, IMAGE), PROMPTS)


LONG = "the cat on the hill, " * 6


def test_long_prompts_are_refused_before_and_at_the_call(clip_folder):
    score = mix({"clip": {"kind": "clip_score", "model": str(clip_folder)}})
    message = (
        r"the prompt 'the cat on the hill, .*\.\.\.' has \d+ tokens and the model reads 24 at most; shorten it, or"
    )
    from sfgrpo.prompts import Prompt

    check_prompts(score, [Prompt(p) for p in PROMPTS], (8, 8))
    with pytest.raises(ValueError, match=message):
        check_prompts(score, [Prompt("a cat"), Prompt(LONG)], (8, 8))
    with pytest.raises(ValueError, match=message):
        score(images(8, 8, count=2), ["a cat", LONG], [{}, {}])


def test_truncate_cuts_off_the_end(clip_folder):
    reward = reward_at(clip_folder, truncate=True)
    batch = images(IMAGE, IMAGE, count=1).expand(3, -1, -1, -1)
    first, second, other = reward(batch, [LONG, LONG + "two blue dogs", "two blue dogs " + LONG]).tolist()
    assert abs(first - second) < 1e-6 < 1e-4 < abs(first - other)
    reward.check_prompt(LONG, {}, (8, 8))


def test_inputs_are_checked(clip_folder):
    reward = reward_at(clip_folder)
    batch = images(IMAGE, IMAGE)
    with pytest.raises(ValueError, match="5 images need as many prompts, got 1"):
        reward(batch, ["a cat"])
    for wrong in ((batch * 255).byte(), batch[:, :1], batch[0], batch.movedim(1, -1)):
        with pytest.raises(ValueError, match=r"images must be \(B, 3, H, W\) floating point in \[0, 1\], got \("):
            reward(wrong, PROMPTS)


def test_a_device_that_is_not_there(clip_folder):
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    reward = get_reward("clip_score", model=str(clip_folder), device="cuda:1")
    for call in (reward.check, lambda: reward(images(IMAGE, IMAGE), PROMPTS)):
        with pytest.raises(ValueError, match="device 'cuda:1' cannot be used: ") as error:
            call()
        assert "\n" not in str(error.value)


def test_one_model_serves_the_trained_and_the_watched_mix(clip_folder):
    table = {"clip_score": {"model": str(clip_folder)}}
    trained, watched = mix(table), mix({"c": {"kind": "clip_score", "model": str(clip_folder), "weight": -2.0}})
    assert trained.terms[0].fn is watched.terms[0].fn
    batch = images(IMAGE, IMAGE)
    one, two = (score(batch, PROMPTS, [{}] * 5) for score in (trained, watched))
    torch.testing.assert_close(two.total, -2 * one.total)
    assert combine(trained.terms) == trained
