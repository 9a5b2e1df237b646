"""Serving: what the server adds to the pipeline, and the elastic scheduler against first come first served.

    python -m bench.serving [--quick] [--json FILE]

Overhead: videos of the model that comes with weft, all asked for at once over HTTP from a server on two
ranks, against the same videos by the same pipeline in a loop: by a process for each core, or by both ranks
together, whichever is faster. They are so many that both ranks are busy until the last two. Times are until
the last file is written; contenders take turns, a ratio is the median over rounds. Client and server share
the two cores with the ranks.

Mixed: images and long videos arrive at random times, the same for a server with each schedule, at a load of
0.8 of what two ranks can do. In time is what takes at most three times what it takes alone on an idle elastic
server. The limit of what is in time is that of a fluid: at each deadline no more work than both ranks do; of
the images' latency, that of one alone. Batches do less work than their jobs, so they may come above.

Estimates: see `bench.serving_estimates`. Isolation: see `bench.serving_isolation`.

Simulated: the same schedulers on 8 to 64 GPUs, images and videos of a model like Wan2.1-14B, whose times are
the planner's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from rich.progress import Progress

from bench import serving_simulator
from bench.rows import Line, Results, Row, Took, interleave, main, median_ratio, quartiles, undisturbed
from bench.serving_estimates import busy_cores, estimates
from bench.serving_isolation import OPTIONS, delete_of_longest, image_beside_longest
from bench.serving_rank import each, prepare, shared
from weft.run.spawn.pool import Pool
from weft.serve import load_test
from weft.serve.jobs import JobShape
from weft.simulate.clusters import cluster

OVERHEAD, BETTER, SHARE = 1.05, 1.3, 0.5
"""The bars: time over the loop's, in time over the better of the others, p95 of images over theirs."""
SERVER, EACH, SHARED = "weft serve", "a process a core, each in a loop", "both ranks together, in a loop"
POLICIES = ("elastic", "all", "one")
NAMES = {"elastic": "elastic", "all": "all ranks, in turn", "one": "one rank each, in turn"}
RANKS, LOAD, SLO = 2, 0.8, 3.0
MIX = {"image": 0.8, "video": 0.2}


@dataclass(frozen=True, kw_only=True)
class ServingSize:
    """How long all of it takes."""

    videos: int
    steps: int
    rounds: int
    """At least."""
    seconds: float
    mixed: float
    """Seconds of arrivals for each schedule; 0 leaves this part out, since a few tell nothing."""
    frames: int
    clusters: tuple[str, ...]
    count: int
    seeds: tuple[int, ...]


FULL = ServingSize(
    videos=24, steps=20, rounds=3, seconds=200.0, mixed=60.0, frames=64, count=120, seeds=(7, 8),
    clusters=("8xh100", "2x8xh100", "4x8xh100", "8x8xh100"),
)  # fmt: skip
QUICK = ServingSize(
    videos=4, steps=10, rounds=2, seconds=2.0, mixed=0.0, frames=32, count=60, seeds=(7,),
    clusters=("8xh100", "2x8xh100"),
)  # fmt: skip


@contextmanager
def served(policy: str, *options: str) -> Iterator[str]:
    """The address of a real server that lasts as long as the block."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        command = ["serve", "--port", "0", "--data", folder, "--ranks", str(RANKS), "--policy", policy]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft", *command, "--max-queue", "10000", *options],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            yield _url(process, Path(folder) / "log")
        finally:
            process.terminate()
            process.communicate()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().decode().split()
    if not words:
        raise RuntimeError(f"The server ended: {log.read_text()[-2000:]}")
    return next(word for word in words if word.startswith("http://"))


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    size, report = QUICK if quick else FULL, Results()
    with ExitStack() as stack:
        task = progress.add_task("starting servers", total=None)
        policies = POLICIES if size.mixed else POLICIES[:1]
        urls: dict[str, str] = dict(zip(policies, stack.enter_context(_together(policies)), strict=True))
        progress.update(task, description="overhead")
        with Pool(RANKS, threads=1, timeout=300.0) as pool:
            overhead(report, urls["elastic"], pool, size)
        if size.mixed:
            progress.update(task, description="mixed")
            mixed(report, urls, size)
    progress.update(task, description="estimates")
    with ExitStack() as stack:
        with busy_cores():
            url = stack.enter_context(served("elastic"))
        estimates(report, url, quick=quick)
    if not quick:
        progress.update(task, description="isolation")
        with served("elastic", *OPTIONS) as url:
            image_beside_longest(report, url)
        with served("one", *OPTIONS) as url:
            delete_of_longest(report, url)
    progress.update(task, description="simulated")
    simulated(report, size)
    progress.remove_task(task)
    return report


@contextmanager
def _together(policies: Sequence[str]) -> Iterator[list[str]]:
    """A server for each; those that have nothing to do take next to nothing."""
    from concurrent.futures import ThreadPoolExecutor

    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        yield list(threads.map(lambda policy: stack.enter_context(served(policy)), policies))


def overhead(report: Results, url: str, pool: Pool, size: ServingSize) -> None:
    pool.run(prepare)
    case = f"{size.videos} videos of {size.steps} steps at once"
    made: list[str] = []
    contenders = {
        SERVER: lambda seeds: made.extend(asyncio.run(videos(url, seeds, size.steps))),
        EACH: lambda seeds: pool.run(each, seeds, size.steps),
        SHARED: lambda seeds: pool.run(shared, seeds, size.steps),
    }

    def play(turn: int) -> list[dict[str, Took]]:
        names, took = list(contenders), {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            contenders[name](range(turn * size.videos, (turn + 1) * size.videos))
            took[name] = Took(time.perf_counter() - began, 0.0)
            asyncio.run(deleted(url, made))
        return [took]

    first = play(0)[0]  # plans are made, allocators grow, the scheduler sees what a step takes
    best = min((EACH, SHARED), key=lambda name: first[name].wall)
    slower = SHARED if best == EACH else EACH
    del contenders[slower]
    rounds = undisturbed(list(interleave(play, size.seconds, least=size.rounds)))
    wall = {name: [one.took[name].wall for one in rounds] for name in contenders}
    ratio = median_ratio(wall[SERVER], wall[best])
    report.rows.append(
        Row(
            case=case, measured=median(wall[SERVER]), unit="s", peer=median(wall[best]), peer_name=best,
            limit=median(wall[best]), bar=f"serve/loop ≤ {OVERHEAD} (is {ratio:.3f})",
            holds=ratio <= OVERHEAD,
        )
    )  # fmt: skip
    report.lines.extend(
        Line(case=case, name=name, measured=median(times), quartiles=quartiles(times), unit="s",
             ratio=median_ratio(times, wall[SERVER]), note=f"{len(rounds)} rounds" if name == SERVER else "")
        for name, times in wall.items()
    )  # fmt: skip
    report.lines.append(
        Line(case=case, name=slower, measured=first[slower].wall, unit="s",
             ratio=first[slower].wall / first[SERVER].wall, note="once, to see which loop is faster")
    )  # fmt: skip


async def videos(url: str, seeds: Sequence[int], steps: int) -> list[str]:
    """Until the last is made. One of them is watched, and then those that are left are asked after."""
    asks = load_test.RequestTemplate(steps=steps)
    async with load_test.ServerClient(url) as client:
        ids = [await client.create(asks.body("video", seed)) for seed in seeds]
        for id in reversed(ids):
            await client.end(id)
    return ids


async def deleted(url: str, ids: list[str]) -> None:
    """Which nobody has to wait for: a loop keeps nothing either."""
    async with load_test.ServerClient(url) as client:
        await client.delete(ids)
    ids.clear()


def mixed(report: Results, urls: Mapping[str, str], size: ServingSize) -> None:
    asks = load_test.RequestTemplate(frames=size.frames, steps=size.steps)
    alone = asyncio.run(isolated(urls["elastic"], asks))
    work = asyncio.run(isolated(urls["one"], asks))
    rate = LOAD * RANKS / sum(share * work[kind] for kind, share in MIX.items())
    trace = load_test.poisson_arrivals(rate, size.mixed, MIX, seed=1)
    shares = {
        policy: asyncio.run(load_test.run_load_test(url, trace, slo=SLO, template=asks, alone=alone))
        for policy, url in urls.items()
    }
    case = f"{len(trace)} images and videos in {size.mixed:.0f} s on {RANKS} ranks"
    numbers = {
        policy: {"attained": each.attained(), "image_p95": each.percentile("image", 95) or float("inf"),
                 "video_p95": each.percentile("video", 95) or float("inf")}
        for policy, each in shares.items()
    }  # fmt: skip
    judge(report, case, numbers, bound=fluid(trace, alone, work), alone=alone["image"])


async def isolated(url: str, asks: load_test.RequestTemplate) -> dict[str, float]:
    async with load_test.ServerClient(url) as client:
        return await load_test.measure_alone(client, sorted(MIX), asks)


def fluid(
    trace: Sequence[load_test.RequestArrival], alone: Mapping[str, float], work: Mapping[str, float]
) -> float:
    """The share in time of the best schedule there could be, of work that can be split as one likes."""
    shapes = {
        kind: JobShape(frames=n, height=1, width=1, steps=1, guided=False) for n, kind in enumerate(MIX, 1)
    }
    kinds = {shape: kind for kind, shape in shapes.items()}
    times = SimpleNamespace(
        sizes=[1], total=lambda shape, _ranks: work[kinds[shape]], topology=SimpleNamespace(ranks=RANKS)
    )
    jobs = [
        serving_simulator.SimulatedJob(each.at, shapes[each.kind], each.at + SLO * alone[each.kind])
        for each in trace
    ]
    return serving_simulator.bound(jobs, times)  # type: ignore[arg-type]


def simulated(report: Results, size: ServingSize) -> None:
    for name in size.clusters:
        table = serving_simulator.table([cluster(name)], loads=(LOAD,), count=size.count, seeds=size.seeds)
        rows = {row["policy"]: row for row in table}
        case = f"simulated, {rows['elastic']['ranks']} ranks"
        judge(report, case, rows, bound=rows["elastic"]["bound"], alone=None)


def judge(
    report: Results, case: str, numbers: Mapping[str, Mapping[str, Any]], *, bound: float, alone: float | None
) -> None:
    """Elastic against the better of the others, which may be another one for each question."""
    mine, others = numbers["elastic"], [policy for policy in numbers if policy != "elastic"]
    most = max(others, key=lambda policy: numbers[policy]["attained"])
    least = min(others, key=lambda policy: numbers[policy]["image_p95"])
    theirs = numbers[most]["attained"]
    gain = mine["attained"] / theirs if theirs else float("inf") if mine["attained"] else 0.0
    share = mine["image_p95"] / numbers[least]["image_p95"]
    report.rows.append(
        Row(
            case=f"{case}, in time", measured=100 * mine["attained"], unit="%", peer=100 * theirs,
            peer_name=NAMES[most], limit=100 * bound, bar=f"elastic/other ≥ {BETTER} (is {gain:.2f})",
            holds=gain >= BETTER,
        )
    )  # fmt: skip
    report.rows.append(
        Row(
            case=f"{case}, p95 of images", measured=mine["image_p95"], unit="s",
            peer=numbers[least]["image_p95"], peer_name=NAMES[least], limit=alone,
            bar=f"elastic/other ≤ {SHARE} (is {share:.2f})", holds=share <= SHARE,
        )
    )  # fmt: skip
    for policy, numbers_of in numbers.items():
        note = f"{numbers_of['attained']:.1%} in time, p95 of videos {numbers_of['video_p95']:.1f} s"
        report.lines.append(
            Line(case=case, name=NAMES[policy], measured=numbers_of["image_p95"], unit="s", note=note,
                 ratio=numbers_of["image_p95"] / mine["image_p95"])
        )  # fmt: skip


if __name__ == "__main__":
    main(measure, __doc__ or "")
