"""`tree_attention` on the CPU: what it checks and says, which implementation it takes, tile lists by brute force,
FlexAttention's eager form."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import forests  # noqa: E402

from treepack.attention import TreeTiles, reference, tiles, tree_attention, tree_tiles  # noqa: E402  # noqa: E402


def inputs(n, heads=4, kv_heads=2, size=16, dtype=torch.float32, values=None):
    shapes = ((heads, size), (kv_heads, size), (kv_heads, values or size))
    return [torch.randn(1, n, *shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def random_end(n, seed=0, padding=0):
    return torch.from_numpy(
        forests.layout(forests.random_nests(random.Random(seed + n), n), padding=padding).subtree_end
    )


def test_the_cpu_takes_the_reference():
    end, (q, k, v) = random_end(30), inputs(30)
    want = reference.tree_attention(q, k, v, end)
    assert torch.equal(tree_attention(q, k, v, subtree_end=end), want)
    assert torch.equal(tree_attention(q, k, v, tree_tiles(end)), want)

    class Tree:
        subtree_end, position_ids = end, torch.arange(30)

    assert torch.equal(tree_attention(q, k, v, Tree()), want)
    assert torch.equal(tree_attention(q, k, v, subtree_end=end.long(), impl="reference"), want)


def test_importing_treepack_does_not_import_torch():
    code = "import sys, treepack; assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"subtree_end": None}, ValueError, "either a tree or subtree_end"),
        (
            {"subtree_end": torch.zeros(7, dtype=torch.int32)},
            ValueError,
            r"\(7,\) for 8 tokens: it was made for another packed tree",
        ),
        ({"subtree_end": torch.zeros(8)}, TypeError, "float32"),
        ({"subtree_end": [8] * 8}, TypeError, "list"),
        ({"k": torch.zeros(1, 3, 8, 16)}, ValueError, "multiple of k heads"),
        (
            {"k": torch.zeros(1, 2, 8, 8)},
            ValueError,
            r"q and k must have the same head size \(that of v may be another\): .* k \(1, 2, 8, 8\)",
        ),
        ({"v": torch.zeros(1, 2, 8, 0)}, ValueError, r"head sizes must be at least 1: .* v \(1, 2, 8, 0\)"),
        ({"v": torch.zeros(1, 2, 8, 12), "impl": "triton"}, ValueError, r"multiples of 8, .* not 12 \(v\)"),
        ({"v": torch.zeros(1, 2, 8, 264), "impl": "triton_plain"}, ValueError, r"from 8 to 256, not 264 \(v\)"),
        ({"v": torch.zeros(1, 2, 9, 16)}, ValueError, "same length"),
        ({"q": torch.zeros(2, 4, 8, 16)}, ValueError, "batch size must be 1"),
        ({"q": torch.zeros(8, 4, 16)}, ValueError, r"all \(N, H, D\)"),
        ({"k": torch.zeros(1, 2, 8, 16).double()}, TypeError, "one dtype"),
        ({"sliding_window": 0}, ValueError, "at least 1"),
        ({"softcap": -1.0}, ValueError, "positive"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks must be \(4,\)"),
        ({"impl": "flash"}, ValueError, "triton, triton_plain, gluon, fa4, flex, reference"),
        ({"impl": "triton"}, RuntimeError, "needs a GPU"),
        ({"impl": "fa4"}, TypeError, "bfloat16 and float16, not torch.float32"),
        ({"impl": "fa4", "softcap": 1.0}, ValueError, "does not take softcap"),
        (
            # Zeros: their first numbers are in the test's name, which every worker of pytest must find the same.
            {"impl": "fa4"}
            | {x: torch.zeros_like(y) for x, y in zip("qkv", inputs(8, 4, 2, 128, torch.bfloat16, 64), strict=True)},
            ValueError,
            'one head size, not 128 for q and k and 64 for v; impl="triton" and impl="flex" take two',
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_errors_say_what_is_wrong(change, error, message):
    q, k, v = inputs(8)
    arguments = {"q": q, "k": k, "v": v, "subtree_end": torch.full((8,), 8, dtype=torch.int32)} | change
    with pytest.raises(error, match=message):
        tree_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def unpack(rows, items, row):
    start, runs, fulls, partials = rows[row].tolist()
    pairs = items[start : start + 2 * runs].view(-1, 2).tolist()
    full = [n for first, last in pairs for n in range(first, last)]
    assert len(full) == fulls
    return full, items[start + 2 * runs : start + 2 * runs + partials].tolist(), [last - first for first, last in pairs]


@pytest.mark.parametrize("window", [None, 1, 9, 30])
@pytest.mark.parametrize("transpose", [False, True])
def test_tile_lists_by_brute_force(window, transpose):
    """Every visible pair lies in a listed tile, every pair of a full tile is visible; without a window no listed
    tile is empty."""
    for n, block in ((1, 4), (37, 4), (64, 8), (150, 8), (151, 16)):
        for seed in range(4):
            end = random_end(n, seed, padding=seed * 5)
            depth = reference.tree_depth(end)
            mask = reference.tree_mask(end, sliding_window=window)
            count = -(-len(end) // block)
            square = torch.zeros(count * block, count * block, dtype=torch.bool)
            square[: len(end), : len(end)] = mask
            square = square.T if transpose else square
            cells = square.view(count, block, count, block).transpose(1, 2)
            rows, items = tiles.tile_lists(
                end, block, depth=depth if window else None, window=window, transpose=transpose
            )
            for m in range(count):
                full, partial, lengths = unpack(rows, items, m)
                assert not set(full) & set(partial)
                assert full == sorted(full)
                assert partial == sorted(partial)
                assert all(length >= tiles.MIN_RUN for length in lengths)
                listed = {*full, *partial}
                shown = {t for t in range(count) if cells[m, t].any()}
                assert shown <= listed
                assert window or shown == listed
                for t in full:  # rows past N are in no full tile's way: they are not stored
                    queries = t if transpose else m
                    real = min(block, len(end) - queries * block)
                    assert (cells[m, t][:, :real] if transpose else cells[m, t][:real]).all()


def test_dense_relation_agrees_with_the_lists():
    end = random_end(300, padding=20)
    partial, full = tiles.tile_relation(end, 16, 16)
    rows, items = tiles.tile_lists(end, 16)
    for m in range(len(rows)):
        in_runs, single, _ = unpack(rows, items, m)
        assert sorted(in_runs + single) == (partial | full)[m].nonzero().flatten().tolist()
        assert full[m, in_runs].all()


def test_lists_in_chunks(monkeypatch):
    """Long inputs are worked on piece by piece; the pieces join."""
    end = random_end(400)
    for transpose in (False, True):
        whole = tiles.tile_lists(end, 8, transpose=transpose)
        monkeypatch.setattr(tiles, "_CHUNK", 64)
        parts = tiles.tile_lists(end, 8, transpose=transpose)
        monkeypatch.undo()
        assert torch.equal(whole[0], parts[0])
        assert all(unpack(*whole, m) == unpack(*parts, m) for m in range(len(whole[0])))


def test_a_long_run_is_two_numbers():
    """Metadata of a chain grows with the number of tiles, not with its square."""
    rows, _ = tiles.tile_lists(torch.full((64 * 200,), 64 * 200, dtype=torch.int32), 64)
    assert rows[:, 1].max() == 1
    assert rows[:, 3].max() <= 2


def test_tree_tiles_keep_given_lists():
    end = random_end(200)
    given = {128: tiles.tile_lists(end, 128), 64: tiles.tile_lists(end, 64)}
    tree = TreeTiles(end, None, given)
    assert tree.lists(128) is given[128]
    assert tree.lists(64) is given[64]
    assert tree.depth().tolist() == reference.tree_depth(end).tolist()


def test_lists_that_do_not_go_with_the_tree_are_named():
    """A kernel would read them as int32 on its own device."""
    end = random_end(200)
    rows, items = tiles.tile_lists(end, 128)
    with pytest.raises(ValueError, match=r"tile lists of 128 hold torch\.int64 on cpu; they must be int32"):
        TreeTiles(end, None, {128: (rows.long(), items)})
    with pytest.raises(ValueError, match=r"on meta; they must be int32 on the device of subtree_end, cpu: move"):
        TreeTiles(end, None, {128: (rows, items.to("meta"))})

    class Tree:
        subtree_end, tiles = end, {64: (rows.long(), items)}

    with pytest.raises(ValueError, match="tile lists of 64"):
        tree_attention(*inputs(200), Tree())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 20}, {"softcap": 2.0}, {"sinks": True}, {"scale": 0.3}], ids=str
)
def test_flex(options):
    """Values only: FlexAttention has no backward pass on the CPU (tests/gpu has it)."""
    for n, padding, values in ((150, 0, 16), (200, 9, 16), (90, 5, 24), (90, 0, 8)):
        end, (q, k, v) = random_end(n, padding=padding), inputs(n + padding, values=values)
        more = {**options, "sinks": torch.randn(4)} if options.get("sinks") else options
        out, lse = tree_attention(q, k, v, subtree_end=end, impl="flex", return_lse=True, **more)
        want, want_lse = tree_attention(q, k, v, subtree_end=end, impl="reference", return_lse=True, **more)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)


def test_fa4_names_what_is_missing():
    if not torch.cuda.is_available():
        q, k, v = inputs(8, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="needs a Hopper GPU"):
            tree_attention(q, k, v, subtree_end=torch.full((8,), 8), impl="fa4")


def test_fa4_lists_have_the_strides_of_their_shape():
    """FlashAttention-4 looks at the stride of an axis of one as well."""
    from treepack.attention.fa4 import launch as fa4

    for n in (100, 300, 700):
        for block, transpose in ((128, False), (64, True)):
            for table in fa4.block_lists(torch.full((n,), n, dtype=torch.int32), block, transpose=transpose):
                assert table.stride(-1) == 1


def test_one_list_of_tile_sizes():
    """Kernels run from a checkout without the native extension, so Python has the sizes too: the same."""
    from treepack import _core
    from treepack.attention.tiles import LIST_SIZES, MIN_RUN

    assert _core.TILE_SIZES == LIST_SIZES
    assert MIN_RUN == 2  # rust/tiles.rs
