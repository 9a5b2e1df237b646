"""Guidance on halves of the ranks: the answers of one process, and who computed them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.diffusers.toys import normal, on_ranks, seeded
from tests.threads import ThreadComm, _Board
from weft.core.errors import InputError
from weft.diffusers import guidance
from weft.diffusers.guidance import Guidance, Halves
from weft.run.spawn.pool import Pool
from weft.run.switch import gather, split
from weft.run.world import World, world_of

TOKENS, WIDTH = 7, 4
PROMPT, NEGATIVE = normal(1, 3, WIDTH, seed=2), normal(1, 5, WIDTH, seed=3)


def real() -> Any:
    """Diffusers, when it is needed: ranks import this file."""
    pytest.importorskip("diffusers.models.modeling_outputs")
    return pytest.importorskip("diffusers")


class Toy(nn.Module):
    """Attention over all tokens and to the text, on the tokens of this rank of `mesh`."""

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.mix, self.mesh, self.kind = nn.Linear(WIDTH, WIDTH), None, kind
        seeded(self)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Any = 0.5,
        encoder_hidden_states: Any = PROMPT,
        image_rotary_emb: Any = None,
        extra: Any = None,
    ) -> Any:
        x = hidden_states + torch.as_tensor(timestep).reshape(-1, 1, 1)
        x = x if image_rotary_emb is None else x * image_rotary_emb[0].sum()
        x = x if not isinstance(extra, Tensor) else x + extra
        dims = {"batch": None, "tokens": TOKENS, "width": None}
        mine = x if self.mesh is None else split(x, "tokens", dims=dims, mesh=self.mesh)
        seen = torch.cat([x, encoder_hidden_states.expand(len(x), -1, -1)], 1)
        mine = self.mix(torch.softmax(mine @ seen.mT, -1) @ seen)
        out = mine if self.mesh is None else gather(mine, "tokens", dims=dims, mesh=self.mesh)
        return KINDS[self.kind](out)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda out: out,
    "tuple": lambda out: (out, None),
    "output": lambda out: real().models.modeling_outputs.Transformer2DModelOutput(sample=out),
    "scalar": lambda out: (out, out.sum()),
    "object": lambda out: SimpleNamespace(out=out),
}


RUNS: dict[int, list[tuple[int, int]]] = {}
"""Not in a Log: what a forward can reach must stay as it is between two calls."""


class Log:
    """A model run on meshes, with the ranks and the batch of each run."""

    def __init__(self, model: Any) -> None:
        self.model, self.mesh = model, None
        RUNS[id(self)], model.mesh = [], None

    @property
    def runs(self) -> list[tuple[int, int]]:
        return RUNS[id(self)]

    def __call__(self, mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        comm = (mesh if isinstance(mesh, World) else world_of(mesh, 20.0)).comm
        self.runs.append((comm.size, len(x)))
        self.model.mesh = mesh
        try:
            return type(self.model).forward(self.model, *args, **kwargs)
        finally:
            self.model.mesh = None


Call = Callable[..., Any]


def on_halves(
    ranks: int, job: Callable[[Guidance, Log, Call], Any], model: Callable[[], Any] = Toy
) -> list[Any]:
    """A job on threads: its answer and its runs."""
    size = ranks // 2
    halves, pairs = [_Board(size, 20.0) for _ in range(2)], [_Board(2, 20.0) for _ in range(size)]

    def on_rank(world: World) -> Any:
        branch, place = divmod(world.comm.rank, size)
        half, pair = (World(ThreadComm(*end)) for end in ((halves[branch], place), (pairs[place], branch)))
        made = model().eval()
        guidance, log = Guidance(made, world, Halves(branch, half, pair)), Log(made)
        log.mesh = world
        with torch.no_grad():
            return job(guidance, log, lambda *args, **kwargs: guidance(log, args, kwargs)), log.runs

    return on_ranks(ranks, on_rank)


def is_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def alone(job: Callable[..., Any], model: Callable[[], Any] = Toy) -> Any:
    with torch.no_grad():
        return job(None, None, model().eval())


# One call with a batch of two halves


@pytest.mark.parametrize("kind", ["tensor", "tuple", "output"])
@pytest.mark.parametrize(("ranks", "batch"), [(2, 2), (4, 6), (6, 2)])
def test_an_even_batch_is_split(ranks: int, batch: int, kind: str) -> None:
    rope = normal(2, WIDTH), normal(2, WIDTH, seed=8)  # as long as a batch of two, and none

    def job(_: Any, __: Any, model: Call) -> Any:
        x, text = normal(batch, TOKENS, WIDTH), normal(batch, 3, WIDTH, seed=4)
        times = normal(batch, seed=5)
        return [
            model(x, times, text),
            model(
                hidden_states=x,
                timestep=times[:1].expand(batch),
                encoder_hidden_states=text,
                image_rotary_emb=rope,
            ),
            model(x, times[0], text[:1], rope, {"scale": 1.5}),
            model(x, extra=[text], encoder_hidden_states=PROMPT),
        ]

    def toy() -> Toy:
        return Toy(kind)

    expected = alone(job, toy)
    for found, runs in on_halves(ranks, job, toy):
        is_close(found, expected)
        assert type(found[0]) is type(expected[0])
        assert runs == [(ranks // 2, batch // 2)] * 4


def test_what_cannot_be_split_is_run_by_all() -> None:
    x = normal(2, TOKENS, WIDTH)
    calls: list[dict[str, Any]] = [
        {"hidden_states": x[:1]},
        {"hidden_states": torch.cat([x, x[:1]])},
        {"hidden_states": x, "extra": {"of another size": normal(3)}},  # nobody knows what it is
        {"hidden_states": x, "extra": {"cache": object()}},
    ]

    def job(_: Any, __: Any, model: Call) -> Any:
        return [model(**call) for call in calls]

    expected = alone(job)
    for found, runs in on_halves(4, job):
        is_close(found, expected)
        assert runs == [(4, 1), (4, 3), (4, 2), (4, 2)]


def test_a_list_with_an_item_for_each_of_the_batch() -> None:
    class Shapes(Toy):
        def forward(self, hidden_states: Tensor, img_shapes: list[Any]) -> Any:  # pyright: ignore
            assert len(img_shapes) == len(hidden_states)
            return super().forward(hidden_states * torch.tensor(img_shapes).reshape(-1, 1, 1))

    def job(_: Any, __: Any, model: Call) -> Any:
        return model(hidden_states=normal(4, TOKENS, WIDTH), img_shapes=[1, 2, 3, 4])

    for found, runs in on_halves(2, job, Shapes):
        is_close(found, alone(job, Shapes))
        assert runs == [(1, 2)]


@pytest.mark.parametrize("kind", ["scalar", "object"])
def test_outputs_that_cannot_be_put_together_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"Toy returns a .*cfg='off'"):
        on_halves(2, lambda _, __, model: model(normal(2, TOKENS, WIDTH)), lambda: Toy(kind))


# Two calls a step


def denoise(model: Call, steps: int, plan: Callable[[int], list[dict[str, Any]]]) -> Tensor:
    """Steps that call the model as often, and with what, the plan says."""
    latents = normal(1, TOKENS, WIDTH)
    for step in range(steps):
        x, time = latents.clone(), torch.tensor([step / 7], dtype=torch.float64)
        for call, change in enumerate(plan(step)):
            before = change.pop("before", None)
            if before is not None:
                before(x)
            found = model(**{"hidden_states": x, "timestep": time / 1, **change})[0]
            latents = latents - (0.1 + call / 5) * found
    return latents


def guided(step: int) -> list[dict[str, Any]]:
    # The text is another tensor in each step, and named in another order in the second call.
    del step
    return [
        {"encoder_hidden_states": PROMPT.clone(), "extra": None},
        {"extra": None, "encoder_hidden_states": NEGATIVE},
    ]


def check(
    ranks: int, steps: int, plan: Callable[[int], Any], runs: str, model: Callable[[], Any] = Toy
) -> None:
    """`runs` has an a for each run on all ranks, an h for each on half of them."""

    def job(_: Any, __: Any, model: Call) -> Tensor:
        return denoise(model, steps, plan)

    expected = alone(job, model)
    sizes = {"a": ranks, "h": ranks // 2}
    for found, (answer, sequence) in enumerate(on_halves(ranks, job, model)):
        is_close(answer, expected)
        assert sequence == [(sizes[run], 1) for run in runs], found


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_the_second_call_of_a_step_is_computed_beside_the_first(ranks: int) -> None:
    check(ranks, 4, guided, "aahhh")


def test_a_model_called_once_a_step_is_left_alone() -> None:
    check(2, 4, lambda step: guided(step)[:1], "aaaa")


def test_guidance_that_ends_and_begins_again() -> None:
    # Step 2 has one call, which is noticed in step 3; 3 and 4 have one, 5 to 7 two.
    check(
        4,
        8,
        lambda step: guided(step)[: 1 if 2 <= step < 5 else 2],
        "aa" + "h" + "h" + "a" + "a" + "aa" + "hh",
    )


def test_a_step_of_three_calls() -> None:
    def plan(step: int) -> list[dict[str, Any]]:
        return [*guided(step), {"encoder_hidden_states": PROMPT * 2, "extra": None}]

    check(2, 3, plan, "aaa" + "ah" * 2)


def test_a_prompt_that_is_another_between_steps() -> None:
    text = NEGATIVE.clone()

    def plan(step: int) -> list[dict[str, Any]]:
        other = torch.full_like(text, step) if step in (2, 3) else text
        return [{"encoder_hidden_states": PROMPT}, {"encoder_hidden_states": other}]

    check(2, 6, plan, "aa" + "h" + "ha" * 3 + "aa")


@pytest.mark.parametrize(("written", "expected"), [(0, [2, 2, 1, 2, 2, 1]), (1, [2, 2, 1, 1, 1])])
def test_a_prompt_that_is_written_between_steps(written: int, expected: list[int]) -> None:
    def job(_: Any, __: Any, model: Call) -> Tensor:
        texts = PROMPT.clone(), NEGATIVE.clone()

        def plan(step: int) -> list[dict[str, Any]]:
            if step == 2:
                texts[written].add_(1)
            return [{"encoder_hidden_states": text} for text in texts]

        return denoise(model, 4, plan)

    for found, runs in on_halves(2, job):
        is_close(found, alone(job))
        assert [size for size, _ in runs] == expected


@pytest.mark.parametrize("inference", [False, True])
def test_latents_that_are_written_between_the_calls_are_noticed(inference: bool) -> None:  # noqa: FBT001
    def plan(step: int) -> list[dict[str, Any]]:
        first, second = guided(step)
        return [first, second | {"before": (lambda x: x.mul_(1.5)) if step == 2 else None}]

    def job(_: Any, __: Any, model: Call) -> Tensor:
        with torch.inference_mode() if inference else torch.no_grad():
            return denoise(model, 5, plan)

    expected = alone(job)
    for found, runs in on_halves(2, job):
        is_close(found, expected)
        assert [size for size, _ in runs] == [2, 2, 1, 1, 2, 2, 2, 1]


def test_guessing_ends_when_it_is_mostly_wrong() -> None:
    def plan(step: int) -> list[dict[str, Any]]:
        return [{"encoder_hidden_states": PROMPT}, {"encoder_hidden_states": NEGATIVE + step}]

    check(2, 8, plan, "aa" + "ha" * 3 + "aa" * 4)


def test_forget_lets_go_of_everything() -> None:
    def job(guidance: Guidance, _: Log, model: Call) -> list[Any]:
        denoise(model, 3, lambda step: guided(step)[: 2 - (step == 2)])  # an answer is kept that nobody takes
        held = guidance._computed, guidance._pattern
        guidance.forget()
        return [*held, guidance._computed, guidance._pattern, guidance._last]

    for (*held, kept, pattern, last), _ in on_halves(2, job):
        assert None not in held
        assert (kept, pattern, last) == (None, None, None)


# What a model's answer depends on besides its arguments


def test_a_model_that_is_changed_for_the_second_call_is_not_guessed() -> None:
    """As guiders do that skip layers, and scripts that switch an adapter off."""

    class Doubles(Toy):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, none = super().forward(*args, **kwargs)
            return out * vars(self.mix)["scaling"]["lora"], none

    def job(guidance: Guidance | None, log: Log | None, model: Any) -> Tensor:
        scaling = (log.model if log else model).mix.scaling = {"lora": 1.0}

        def plan(step: int) -> list[dict[str, Any]]:
            scale = 2.0 if step < 2 else 1.0
            first, second = guided(step)
            return [
                first | {"before": lambda _: scaling.update(lora=1.0)},
                second | {"before": lambda _: scaling.update(lora=scale)},
            ]

        return denoise(model, 4, plan)

    expected = alone(job, Doubles)
    for found, runs in on_halves(2, job, Doubles):
        is_close(found, expected)
        assert [size for size, _ in runs] == [2] * 6 + [1]


class Perturbed(Toy):
    """Reads settings of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.processor, self.flag = 1.0, SimpleNamespace(scale=1.0), {"on": False}
        flag = self.flag
        self.mix.register_forward_hook(lambda _m, _a, out: out * 2 if flag["on"] else out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, none = super().forward(*args, **kwargs)
        return out * self.scale * self.processor.scale, none


def hook(module: Any, on: bool) -> None:  # noqa: FBT001
    """Puts one on, or takes it off."""
    if on:
        module.handle = module.mix.register_forward_hook(lambda _m, _a, out: out * 2)
    else:
        vars(module).pop("handle", SimpleNamespace(remove=lambda: None)).remove()


def write(weight: Tensor, on: bool) -> None:  # noqa: FBT001
    with torch.no_grad():
        weight.mul_(2.0 if on else 0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, on: setattr(m, "scale", 1.0 + on),
        lambda m, on: setattr(m.processor, "scale", 1.0 + on),
        lambda m, on: setattr(m, "processor", SimpleNamespace(scale=1.0 + on)),
        lambda m, on: m.flag.update(on=on),
        hook,
        lambda m, on: write(m.mix.weight, on),
    ],
    ids=["attribute", "attribute of a processor", "processor", "closure", "hook", "weight"],
)
@pytest.mark.parametrize("first", [1, 3])
def test_what_is_set_between_the_two_calls_is_seen(change: Callable[[Any, bool], None], first: int) -> None:
    """Own perturbed guidance: from some step on, the second call has another model."""

    def job(_: Any, log: Log | None, model: Any) -> Tensor:
        toy = log.model if log else model

        def plan(step: int) -> list[dict[str, Any]]:
            if step < first:
                return guided(step)
            one, other = guided(step)
            return [
                one | {"before": lambda _: change(toy, False) if step > first else None},  # noqa: FBT003
                other | {"before": lambda _: change(toy, True)},  # noqa: FBT003
            ]

        return denoise(model, 6, plan)

    expected = alone(job, Perturbed)
    for found, _ in on_halves(2, job, Perturbed):
        is_close(found, expected)


def test_a_hook_that_one_rank_has_does_not_part_the_ranks() -> None:
    """It writes down what it sees; the others must not compute the second call beside the first then."""

    def job(_: Any, log: Log | None, model: Any) -> Tensor:
        seen: list[Any] = []
        if log and world_of(log.mesh, 20.0).comm.rank == 0:
            log.model.mix.register_forward_hook(lambda _m, _a, out: seen.append(out))
        return denoise(model, 6, guided)

    for found, runs in on_halves(2, job):
        is_close(found, alone(job))
        assert runs == [(2, 1)] * 12


def test_a_model_with_a_cache_of_diffusers_is_run_by_all() -> None:
    def job(_: Any, log: Log | None, model: Any) -> Tensor:
        toy = log.model if log else model
        hook = real().hooks.hooks.ModelHook()
        hook._is_stateful = True
        real().hooks.HookRegistry.check_if_exists_or_initialize(toy.mix).register_hook(hook, "cache")
        model(normal(2, TOKENS, WIDTH))
        return denoise(model, 2, guided)

    for found, runs in on_halves(2, job):
        is_close(found, alone(job))
        assert runs == [(2, 2)] + [(2, 1)] * 4


def test_training_is_left_alone() -> None:
    def job(_: Any, log: Log | None, model: Any) -> None:
        with torch.enable_grad():
            model(normal(2, TOKENS, WIDTH))
        if log:
            log.model.train()
        model(normal(2, TOKENS, WIDTH))

    assert all(runs == [(2, 2)] * 2 for _, runs in on_halves(2, job))


# Real ranks, and real pipelines


def on_a_process(mode: str) -> Any:
    toy = Toy().eval()
    guidance, again, log = Guidance.of(toy, None, mode), Guidance.of(toy, dist.group.WORLD, mode), Log(toy)
    assert guidance.halves is again.halves
    with torch.no_grad():
        out = denoise(lambda *args, **kwargs: guidance(log, args, kwargs), 3, guided)
        batch = guidance(log, (normal(4, TOKENS, WIDTH),), {})[0]
    return out, batch, log.runs


@pytest.mark.parametrize(("mode", "expected"), [("auto", "44222"), ("off", "4444444")])
def test_processes(worlds: Callable[[int], Pool], mode: str, expected: str) -> None:
    toy = Toy().eval()
    with torch.no_grad():
        out, batch = denoise(toy, 3, guided), toy(normal(4, TOKENS, WIDTH))[0]
    for found, found_batch, runs in worlds(4).run(on_a_process, mode):
        is_close(found, out)
        is_close(found_batch, batch)
        assert "".join(str(size) for size, _ in runs) == expected


def test_modes() -> None:
    with pytest.raises(
        InputError, match=r"two halves .* there are 3\. Start 2 or 4 ranks, or use cfg='auto'"
    ):
        on_ranks(3, lambda world: Guidance.of(Toy(), world, "on"))
    with pytest.raises(InputError, match="one of auto, on, off"):
        Guidance.of(Toy(), None, "yes")
    assert Guidance.of(Toy(), None, "on").halves is None  # one rank: the same script runs


def wan() -> Any:
    return real().WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=WIDTH, freq_dim=16, ffn_dim=8, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip


def flux() -> Any:
    return real().FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def cogvideox() -> Any:
    return real().CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=WIDTH, num_layers=1, sample_width=4, sample_height=4, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=3, use_rotary_positional_embeddings=True,
    )  # fmt: skip


def single(*shape: int, seed: int = 1) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float32)


def generate(made: nn.Module) -> Tensor:
    """A pipeline around a transformer, latents in, latents out."""
    euler = real().FlowMatchEulerDiscreteScheduler()
    given: dict[str, Any] = {"height": 32, "width": 32}
    if isinstance(made, real().WanTransformer3DModel):
        pipe = real().WanPipeline(None, None, None, euler, made)
        given |= {"num_frames": 9, "latents": single(1, 4, 3, 4, 4)}
    elif isinstance(made, real().FluxTransformer2DModel):
        pipe = real().FluxPipeline(euler, None, None, None, None, None, made)
        pooled = single(1, WIDTH, seed=5)
        given |= {"true_cfg_scale": 3.0, "latents": single(1, 4, 4)}
        given |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": -pooled}
    else:
        vae = real().AutoencoderKLCogVideoX(block_out_channels=(2,) * 4, norm_num_groups=2, latent_channels=4)
        pipe = real().CogVideoXPipeline(None, None, vae, made, real().CogVideoXDDIMScheduler())
        given |= {"num_frames": 9, "latents": single(1, 3, 4, 4, 4)}
    pipe.set_progress_bar_config(disable=True)
    prompts = {"prompt_embeds": single(1, 3, WIDTH), "negative_prompt_embeds": single(1, 3, WIDTH, seed=3)}
    return pipe(**prompts, **given, num_inference_steps=4, output_type="latent", return_dict=False)[0]


@pytest.mark.parametrize(
    ("transformer", "runs"),
    [(wan, [(4, 1)] * 2 + [(2, 1)] * 3), (flux, [(4, 1)] * 2 + [(2, 1)] * 3), (cogvideox, [(2, 1)] * 4)],
)
def test_pipelines(transformer: Callable[[], Any], runs: list[tuple[int, int]]) -> None:
    """Each rank computes all tokens: what is looked at here is who computes which call."""

    def model() -> Any:
        return seeded(transformer(), dtype=torch.float32)

    expected = generate(model().eval())

    def job(guidance: Guidance, log: Log, call: Call) -> Tensor:
        log.model.forward = call
        return generate(log.model)

    for found, found_runs in on_halves(4, job, model):
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        assert found_runs == runs


@pytest.mark.parametrize(("inference", "expected"), [(False, [2]), (True, [3])])
def test_arguments_are_compared_with_one_read_of_a_device(
    inference: bool,  # noqa: FBT001
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read of a GPU waits for all that was launched on it."""
    reads: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(guidance.torch, "stack", lambda claims: reads.append(len(claims)) or stack(claims))
    with torch.inference_mode() if inference else torch.no_grad():
        time = torch.tensor([3.0])
        first, second = ({"a": PROMPT.clone(), "b": PROMPT.clone(), "time": time.expand(4)} for _ in range(2))
        before = guidance.ModelCall.of((), first, [])
        assert before.differences(guidance.ModelCall.of((), second, [])) == []
        assert reads == expected, "views of the same memory need no read"
        assert before.differences(guidance.ModelCall.of((), second | {"b": PROMPT + 1}, [])) == [1]
