"""VideoDiT: any ranks give what one process gives, and its gradients; sizes, configurations, compiling."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import weft
from tests.diffusers.toys import check, normal, on_ranks, seeded, step
from weft.core import tables
from weft.core.errors import InputError
from weft.video.transformer import DiTConfig, Rope, VideoDiT, apply_rotary_emb

CONFIG = DiTConfig(words=11, length=7, video=(4, 6, 10), patch=(2, 2, 2), width=36, depth=2, heads=3)
"""2 × 3 × 5 patches, 7 words, heads of 12."""


def model(config: DiTConfig = CONFIG) -> Any:
    return seeded(VideoDiT(config))


def inputs(config: DiTConfig = CONFIG, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    T, H, W = config.video
    words = torch.randint(config.words, (batch, config.length), generator=torch.Generator().manual_seed(3))
    words[0, -2:] = 0
    return normal(batch, T, config.channels, H, W), torch.linspace(0.9, 0.2, batch).double(), words


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("config", "plan", "again"),
    [
        (CONFIG, "auto", False),
        (replace(CONFIG, length=2, phrase=2, qk_norm=False, video=(2, 2, 26)), "gather", True),
    ],
    ids=["many", "few"],
)
def test_any_ranks_give_what_one_process_gives(config, plan, again, ranks) -> None:
    """Of few, 13 patches and 2 words are more than some have ranks."""

    def job(world: Any) -> Any:
        own = model(config)
        if again:
            own.enable_gradient_checkpointing()
        return step(weft.parallelize(own, mesh=world, plan=plan), *inputs(config))

    check(step(model(config), *inputs(config)), on_ranks(ranks, job), 1e-11)


def test_a_sparse_mask_knows_where_patches_are() -> None:
    def job(world: Any) -> Tensor:
        return weft.parallelize(model(), mesh=world, sparse="topk:0.4,tile=1x3x1,block=4,dense_steps=0")(
            *given
        )

    given, dense = inputs(), model()(*inputs())
    with torch.no_grad():
        one, three = on_ranks(1, job)[0], on_ranks(3, job)[0]
    torch.testing.assert_close(three, one, rtol=0, atol=1e-11)
    assert (one - dense).abs().max() > 1e-6


def test_a_word_knows_the_others_of_its_phrase_and_no_more() -> None:
    own, words = model(replace(CONFIG, length=8, phrase=4)).text, torch.arange(1, 9)[None]
    changed = words.clone()
    changed[0, 5] = 10
    before, after = (own(given)[0][0] for given in (words, changed))
    assert (before != after).any(1).tolist() == [False] * 4 + [True] * 4
    with pytest.raises(InputError, match="phrase=3"):
        replace(CONFIG, phrase=3)


def test_a_patch_comes_back_to_its_place() -> None:
    """A model that is but its patches gives a video back, whatever its size."""
    own = VideoDiT(CONFIG).double()
    video = normal(2, 6, 3, 4, 8)
    patches = own._patchify(video)
    assert torch.equal(own._unpatchify(patches), video)
    assert torch.equal(patches[1, 2, 1, 3].reshape(2, 3, 2, 2), video[1, 4:6, :, 2:4, 6:8])


def test_other_sizes_run_too() -> None:
    own, (_, timestep, words) = model(), inputs()
    assert own(normal(2, 6, 3, 4, 14), timestep, words).shape == (2, 6, 3, 4, 14)


@pytest.mark.parametrize("what", ["video", "timestep", "words", "order of words"])
def test_everything_that_is_given_counts(what) -> None:
    own, (video, timestep, words) = model(), inputs()
    own.text.mix.data[:] = 1  # it knows places too
    other = {
        "video": (video.flip(1), timestep, words),
        "timestep": (video, timestep.flip(0), words),
        "words": (video, timestep, (words + 1) % 11),
        "order of words": (video, timestep, words.flip(1)),
    }[what]
    assert (own(*other) - own(video, timestep, words)).abs().max() > 1e-4


def test_a_new_model_predicts_grey_and_its_blocks_are_the_identity() -> None:
    own = VideoDiT(CONFIG).double()
    assert not own(*inputs()).any()
    x = normal(1, 4, 36)
    assert torch.equal(own.blocks[0](x, torch.zeros(1, 6, 36).double(), normal(4, 6), normal(4, 6)), x)


def test_autocast_leaves_attention_on_a_cpu_in_the_dtype_of_the_weights() -> None:
    """Where nobody asks for autocast, a model of 16 bits is computed in them."""
    seen: list[torch.dtype] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is F.scaled_dot_product_attention:
                seen.extend(x.dtype for x in (*args, out))
            return out

    given = [x.float() if x.is_floating_point() else x for x in inputs()]
    with Seen(), torch.autocast("cpu", torch.bfloat16):
        assert model().float()(*given).dtype == torch.bfloat16
    assert seen == [torch.float32] * 4 * CONFIG.depth
    seen.clear()
    with Seen():
        model().bfloat16()(*(x.bfloat16() if x.is_floating_point() else x for x in given))
    assert seen == [torch.bfloat16] * 4 * CONFIG.depth


def test_a_block_shifts_scales_and_gates_its_two_halves_each_by_its_own() -> None:
    block, x, changes = model().blocks[0], normal(2, 4, 36), normal(2, 6, 36, seed=4)
    cos, sin = normal(4, 6, seed=5), normal(4, 6, seed=6)
    by = (changes + block.table)[:, :, None]

    def changed(x: Tensor, at: int) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + by[:, at + 1])
            + by[:, at]
        )

    wanted = x + by[:, 2] * block.attn(changed(x, 0), cos, sin)
    wanted = wanted + by[:, 5] * block.mlp(changed(wanted, 3))
    torch.testing.assert_close(block(x, changes, cos, sin), wanted)


def test_words_are_not_rotated_and_patches_by_their_place() -> None:
    own, seen = model(), list[tuple[Tensor, ...]]()
    own.blocks[1].register_forward_pre_hook(lambda _, given: seen.append(given))
    own(*inputs())
    _, _, cos, sin = seen[0]
    assert (cos[:7] == 1).all() and not sin[:7].any() and len(cos) == len(sin) == 7 + 30
    t, h, w = (int(part) for part in Rope(12).channels)
    angle = 3 * 100.0 ** -(torch.arange(w).double() / w)  # of the patch in frame 1, row 2, column 3
    torch.testing.assert_close(sin[7 + 15 + 2 * 5 + 3, t + h :], angle.sin())


def test_attention_depends_on_how_far_apart_patches_are_in_each_dim() -> None:
    cos, sin = Rope(12)(torch.zeros(1, 4, 4, 4, 1).double())
    turns = torch.complex(cos, sin).reshape(4, 4, 4, 6)
    x, y = normal(12), normal(12, seed=2)
    here, there = (
        apply_rotary_emb(y, cos[at], sin[at]) @ apply_rotary_emb(x, cos[at - 5], sin[at - 5])
        for at in (42, 63)
    )
    torch.testing.assert_close(here, there)
    assert abs(here - y @ x) > 1e-2
    for dim in range(3):
        between = turns.narrow(dim, 1, 3) / turns.narrow(dim, 0, 3)
        torch.testing.assert_close(between, between[:1, :1, :1].expand_as(between))
        assert ((between[0, 0, 0] - 1).abs() > 1e-3).sum() == 2


def test_a_configuration_goes_through_json() -> None:
    again = tables.read(DiTConfig, json.loads(json.dumps(asdict(CONFIG))), "It")
    assert again == CONFIG


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"heads": 5}, "width=36, heads=5"),
        ({"heads": 4}, "heads=4 .* do not fit"),
        ({"video": (4, 6, 9)}, "4×6×9 pixels cannot be cut into patches of 2×2×2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, says) -> None:
    with pytest.raises(InputError, match=says):
        replace(CONFIG, **wrong)


def test_it_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    own = model()
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    check(step(own, *inputs()), [step(compiled, *inputs())], 1e-11)
