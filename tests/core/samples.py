"""One of each small value, for tests that need any."""

from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import WorkItem
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.core.topology import Link

LINK = Link(latency=1e-5, bandwidth=3e9)
LAYOUT = Layout.permuted([[4, 0, 1], [2, 3]]).padded(4)
PROBLEM = Problem(batch=1, heads=2, kv_heads=1, head_dim=3, q=LAYOUT, kv=LAYOUT, dtype="bfloat16")
WORK = WorkItem(Indices.of([0]), Indices.of([0, 1, 4]))
Q = Piece("q", Indices.of([0]), Indices.of([0, 1, 4]))
KV = Piece("kv", Indices.of([0]), Indices.span(0, 5))
MOVE = Transfer(KV, 1, 0)
OPS = (Exchange((MOVE,), "fetch"), Attend(0, Q, KV))
MASK = BlockMask.from_tiles([[[1, 0, 1]], [[0, 1, 1]]], q_len=5, kv_len=5, block_q=7, block_k=2)
SCHEDULE = Schedule("some", PROBLEM, MASK, Mesh.of(ring=2), OPS, backward=True, kept=((Q,), ()))
