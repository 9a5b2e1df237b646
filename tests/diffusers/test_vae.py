"""Decoding shared by threads as ranks, against the same VAE's own tiled decode: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diffusers.toys import normal, on_ranks, seeded
from tests.diffusers.vaes import CASES
from weft.core.errors import AgreementError
from weft.diffusers.vae import TILED_VAES, parallelize_vae
from weft.run.spawn.pool import Pool
from weft.run.world import LocalComm, World, world_of

pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="the VAEs are those of diffusers")


def counted(vae: Any) -> list[int]:
    """Latents of each call of the decoder from now on."""
    sizes: list[int] = []
    vae.decoder.register_forward_hook(lambda _, args, __: sizes.append(args[0].numel()))
    return sizes


@torch.no_grad()
def alone(vae: Any, z: Tensor) -> tuple[Tensor, list[int]]:
    sizes = counted(vae)
    return vae.decode(z).sample, sizes


def shared(ranks: int, build: Callable[[], Any], z: Tensor) -> list[tuple[Tensor, list[int]]]:
    def job(world: World) -> tuple[Tensor, list[int]]:
        vae = build()
        assert parallelize_vae(vae, world).reason == ""
        return alone(vae, z)

    return on_ranks(ranks, job)


def test_all_that_are_known_are_tested() -> None:
    assert {case.name for case in CASES.values()} == TILED_VAES


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_tiled_decode_and_each_rank_has_its_share(name: str) -> None:
    case, ranks = CASES[name], 3
    expected, sizes = alone(case.build(), case.latents())
    assert len(sizes) == case.tiles * case.calls
    assert expected.std() > 0.01
    answers = shared(ranks, case.build, case.latents())
    for found, _ in answers:
        assert torch.equal(found, expected)
    assert sorted(size for _, share in answers for size in share) == sorted(sizes)
    loads = [sum(share) for _, share in answers]
    assert max(loads) - min(loads) <= max(sizes) * case.calls
    assert all(len(share) % case.calls == 0 for _, share in answers)


@pytest.mark.parametrize("name", ["kl", "wan", "cogvideox"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_any_number_of_ranks(ranks: int, name: str) -> None:
    case = CASES[name]
    expected, _ = alone(case.build(), case.latents())
    for found, _ in shared(ranks, case.build, case.latents()):
        assert torch.equal(found, expected)


def test_a_rank_more_than_tiles_gets_them_too() -> None:
    z = normal(1, 4, 5, 4, dtype=torch.float32)
    expected, sizes = alone(CASES["kl"].build(), z)
    answers = shared(5, CASES["kl"].build, z)
    assert len(sizes) == 4
    assert sorted(len(share) for _, share in answers) == [0, 1, 1, 1, 1]
    assert all(torch.equal(found, expected) for found, _ in answers)


@pytest.mark.parametrize(("tiled", "calls"), [(False, 3), (True, 3 * 6)])
def test_slices_of_a_batch_are_shared_too(tiled: bool, calls: int) -> None:
    case = CASES["kl"]
    z = case.latents(batch=3)

    def build() -> Any:
        return case.build(use_slicing=True, use_tiling=tiled)

    expected, _ = alone(build(), z)
    answers = shared(3, build, z)
    assert [len(share) for _, share in answers] == [calls // 3] * 3
    assert all(torch.equal(found, expected) for found, _ in answers)


def test_bfloat16_and_plain_tuples() -> None:
    case = CASES["wan"]
    z = case.latents(torch.bfloat16)

    def job(world: World | None) -> Tensor:
        vae = case.build().to(torch.bfloat16)
        if world is not None:
            parallelize_vae(vae, world)
        with torch.inference_mode():
            (out,) = vae.decode(z=z, return_dict=False)
        return out

    expected = job(None)
    assert expected.dtype == torch.bfloat16
    assert all(torch.equal(found, expected) for found in on_ranks(2, job))


def test_what_is_one_tile_or_not_tiled_or_needs_gradients_is_left_as_it_is() -> None:
    case = CASES["wan"]
    whole, small = case.latents(), normal(1, 4, 2, 3, 3, dtype=torch.float32)

    def job(world: World) -> None:
        vae = case.build()
        parallelize_vae(vae, world)
        sizes = counted(vae)
        with torch.no_grad():
            assert torch.equal(vae.decode(small).sample, case.build().decode(small).sample)
            assert len(sizes) == 2
            vae.disable_tiling()
            assert torch.equal(vae.decode(whole).sample, case.build(use_tiling=False).decode(whole).sample)
            assert len(sizes) == 2 + 2
            vae.enable_tiling()
        vae.decode(whole).sample.mean().backward()
        assert len(sizes) == 2 + 2 + 6 * 2
        assert world.comm.bytes_sent == 0

    on_ranks(2, job)


def test_remove_restores() -> None:
    case = CASES["cogvideox"]
    z = case.latents()
    expected, sizes = alone(case.build(), z)

    def job(world: World) -> None:
        vae = case.build()
        decoder, before = vae.decoder, dict(vars(vae))
        handle = parallelize_vae(vae, world)
        assert torch.equal(alone(vae, z)[0], expected)
        sent = world.comm.bytes_sent
        assert sent > 0
        assert vae.decoder is decoder
        handle.remove()
        handle.remove()
        assert vars(vae).keys() == before.keys()
        found, again = alone(vae, z)
        assert torch.equal(found, expected)
        assert again == sizes
        assert world.comm.bytes_sent == sent

    on_ranks(2, job)


def test_what_cannot_be_spread_is_left_alone_and_says_why() -> None:
    wan = CASES["wan"].build()
    assert parallelize_vae(wan, World(LocalComm())).reason == "There is one rank."
    assert "decode" not in vars(wan)

    def job(world: World) -> None:
        ltx = replace(
            CASES["ltx"], config=CASES["ltx"].config | {"decoder_inject_noise": (False,) * 4 + (True,)}
        )
        for vae, why in [(ltx.build(), "noise"), (nn.Linear(1, 1), "tiles of Linear")]:
            handle = parallelize_vae(vae, world)
            assert why in handle.reason
            handle.remove()
            assert "_weft_wrapper" not in vars(vae)
        vae = CASES["kl"].build()
        first, second = parallelize_vae(vae, world), parallelize_vae(vae, world)
        assert "already" in second.reason
        second.remove()
        assert "_weft_wrapper" in vars(vae)
        first.remove()
        assert "decode" not in vars(vae)

    on_ranks(2, job)


def test_a_rank_that_fails_is_told_of() -> None:
    case = CASES["kl"]

    def job(world: World) -> str:
        vae = case.build()
        parallelize_vae(vae, world)
        if world.comm.rank == 1:
            broken = vae.decoder.register_forward_hook(lambda *_: 1 // 0)
        with torch.no_grad():
            try:
                vae.decode(case.latents())
            except (AgreementError, ZeroDivisionError) as error:
                said = f"{type(error).__name__} {error}"
            if world.comm.rank == 1:
                broken.remove()
            vae.decode(case.latents())  # and all can go on
        return said

    first, second, third = on_ranks(3, job)
    assert second.startswith("ZeroDivisionError")
    assert first == third
    assert "Rank 1 cannot take part: it failed to decode its tiles: integer division" in first


def test_different_latents_raise() -> None:
    def job(world: World) -> None:
        vae = CASES["kl"].build()
        parallelize_vae(vae, world)
        with torch.no_grad():
            vae.decode(normal(1, 4, 7, 5 + 3 * world.comm.rank, dtype=torch.float32))

    with pytest.raises(AgreementError, match="different decodes"):
        on_ranks(2, job)


class AutoencoderTiny(nn.Module):
    """Known by its name, so that the ranks need not import Diffusers' for what is about messages."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.decoder = {}, nn.Conv2d(4, 3, 3)

    def decode(self, z: Tensor) -> Tensor:
        return torch.cat([self.decoder(tile) for tile in z.split([7, 5, 4], dim=-1)], dim=-1)


@torch.no_grad()
def in_a_process(ranks: int) -> tuple[Tensor, int]:
    vae = seeded(AutoencoderTiny(), dtype=torch.float32)
    sizes = counted(vae)
    if ranks > 1:
        assert not parallelize_vae(vae, world_of(None, 20.0)).reason
    return vae.decode(normal(1, 4, 5, 16, dtype=torch.float32)), len(sizes)  # pyright: ignore


def test_processes_do_it_too(worlds: Callable[[int], Pool]) -> None:
    expected, calls = in_a_process(1)
    answers = worlds(2).run(in_a_process, 2)
    assert sorted(share for _, share in answers) == [1, 2]
    assert calls == 3
    assert all(torch.equal(found, expected) for found, _ in answers)
