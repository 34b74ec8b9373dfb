"""What Hopper's kernels share: rings of tiles in shared memory, turns, the layout of products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nsa_core.kernels.triton.rows import HUGE, INFINITY


@gluon.constexpr_function
def product_layout(columns):
    """Where the 64 rows of a warpgroup's product lie; `columns` is how many the product has."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the parity in which its barrier will flip."""
    is_last = slot == STAGES - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def count_turns(num_items):
    """Number of this program's work items: one a turn, in reverse order every other turn.

    If all turns had one order, and the items of a document divided the number of programs, one
    program would get the longest rows of every document, and another the shortest.
    """
    programs = gl.num_programs(0)
    whole = num_items // programs
    return whole + (turn_place(whole) < num_items - whole * programs).to(gl.int32)


@gluon.jit
def turn_place(turn):
    """The place of this program in a turn."""
    return gl.where(turn % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def turn_item(turn):
    """The work item of this program in a turn."""
    return turn * gl.num_programs(0) + turn_place(turn)


@gluon.jit
def clear_rows(tile, rows, D: gl.constexpr, BM: gl.constexpr):
    """Zero the rows of a tile from `rows` on: they belong to the next document, or to nobody."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    value = tile.load(layout)
    tile.store(gl.where((row < rows)[:, None], value, gl.full_like(value, 0.0)))


@gluon.jit
def hide_broken(tile, D: gl.constexpr, BM: gl.constexpr):
    """Make huge what is not finite in a tile of bfloat16, as `rows.hide_unseen` does.

    A look at pairs of numbers, as whole words, says whether there is anything to hide. Both
    warpgroups may do it at once: they write the same.
    """
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    pairs: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    word = tile._reinterpret(gl.int32, [BM, D // 2], words).load(pairs)
    # An exponent of ones carries into the sign's place.
    found = ((word & 0x7F807F80) + 0x00800080) & -0x7FFF8000
    if gl.max(gl.max((found != 0).to(gl.int32), 1), 0) != 0:
        value = tile.load(layout)
        is_finite = gl.abs(value.to(gl.float32)) < INFINITY
        tile.store(gl.where(is_finite, value, gl.full_like(value, HUGE)))
        fence_async_shared()
