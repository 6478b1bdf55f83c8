"""The Hopper kernels without a Hopper GPU: compiled for sm_90, chosen by the documented rule, fed with the right lists.

What they compute is decided on a GPU: tests/gpu.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forests
import numpy as np
import pytest
import tritons

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from treepack.attention import rule as triton_rule  # noqa: E402
from treepack.attention import tree_attention, tree_tiles  # noqa: E402
from treepack.attention import versions as triton_versions  # noqa: E402
from treepack.attention.tiles import NO_ITEM, backward_items, most_split  # noqa: E402
from treepack.attention.triton import common as triton_common  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Of heads that do not fill their tiles, whose kernels differ by their copies alone; 80 compiles to the same as 96.
FEW = ("--dtype", "bf16", "--variant", "plain", "options")


@pytest.mark.parametrize("version", tritons.VERSIONS)
def test_compiled_for_hopper(version):
    """Every variant: no products that ptxas serialises, a handful of spilled words at most, shared memory that a block
    has; with each Triton that the kernels are tested with."""
    env = tritons.environment(version)
    command = [sys.executable, str(ROOT / "benches" / "gluon_compile.py"), "--json", "--size"]
    # One process for each head size, side by side: together they take minutes of one core.
    started = [
        subprocess.Popen([*command, *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for options in (["64"], ["128"], ["256"], ["96", *FEW], ["192/128", *FEW])
    ]
    kernels = []
    for process in started:
        out, errors = process.communicate()
        assert process.returncode == 0, out + errors
        report = json.loads(out.splitlines()[-1])
        assert report["triton"] == version
        kernels += report["kernels"]
    # Head sizes; forms of each kernel in bfloat16, one in float16.
    assert len(kernels) == 3 * (5 + 5 + 4 + 3 * 1) + 2 * 3 * 2
    for row in kernels:
        assert row["registers"] == 168, row  # what the warp groups start from and trade
        assert row["green"], row
        assert row["spills"] == 0 or row["size"] != "64" or row["variant"] == "options", row


def hopper(monkeypatch, version=None):
    """What `choose` says, as on an H100, for queries and values of this dtype and these head sizes."""
    monkeypatch.setattr(triton_rule, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton_rule.triton, "__version__", version or "3.6.0")
    triton_rule._say.cache_clear()

    def rule(impl="triton", dtype=torch.bfloat16, size=128, values=None, window=0, softcap=0.0, scale=0.1, cuda=True):
        q, v = (
            SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(10, 4, x), device=torch.device("cuda:0"))
            for x in (size, values or size)
        )
        return triton_rule.choose(impl, q, v, window, softcap, scale)

    return rule


@pytest.mark.parametrize(
    ("call", "covered"),
    [
        ({}, True),
        ({"size": 64, "dtype": torch.float16}, True),
        ({"size": 32}, False),
        ({"size": 72}, False),
        ({"size": 192, "values": 112}, False),
        ({"size": 64, "values": 128}, False),
        ({"dtype": torch.float32}, False),
        ({"softcap": 1e-25}, False),
        ({"scale": -0.1}, False),
        ({"scale": 0.0}, False),
        ({"scale": 1e-25}, False),
        ({"scale": float("nan")}, False),
        ({"scale": 1e-19}, True),
        ({"cuda": False}, False),
    ],
    ids=str,
)
def test_the_rule(monkeypatch, call, covered):
    rule = hopper(monkeypatch)
    assert rule(**call) == (triton_rule.AUTO if covered else triton_rule.PLAIN)
    assert rule("triton_plain", **call) == triton_rule.PLAIN
    if covered:
        assert rule("gluon", **call) == triton_rule.GLUON
    else:
        with pytest.raises(ValueError, match=r'impl="gluon" cannot run this: they .*; impl="triton" takes it'):
            rule("gluon", **call)


@pytest.mark.parametrize(
    "call", [{"window": 5}, {"softcap": 2.0}, {"window": 5, "softcap": 2.0, "scale": -0.1}, {"size": 256}], ids=str
)
def test_a_form_that_no_gpu_ran_must_be_asked_for(monkeypatch, call):
    rule = hopper(monkeypatch)
    assert rule(**call) == triton_rule.AUTO
    monkeypatch.setattr(triton_rule, "PROVEN_OPTIONS", ())
    monkeypatch.setattr(triton_rule, "PROVEN_SIZES", ((64, 64), (128, 128)))
    assert rule(**call) == triton_rule.PLAIN
    assert rule("gluon", **call) == triton_rule.GLUON


@pytest.mark.parametrize("sizes", [(96, None), (80, None), (192, 128), (192, None), (128, 64)], ids=str)
def test_heads_that_no_gpu_ran_must_be_asked_for(monkeypatch, sizes):
    rule = hopper(monkeypatch)
    call = {"size": sizes[0], "values": sizes[1]}
    assert rule(**call) == triton_rule.PLAIN
    assert rule("gluon", **call) == triton_rule.GLUON


def test_an_older_gpu_runs_the_portable_kernels(monkeypatch):
    rule = hopper(monkeypatch)
    monkeypatch.setattr(triton_rule, "capability", lambda index: (8, 0))
    assert rule() == triton_rule.PLAIN
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        rule("gluon")


def test_the_interpreter_runs_the_portable_kernels(monkeypatch):
    """TRITON_INTERPRET=1 is asked for to look into the kernels, and Gluon has no interpreter."""
    rule = hopper(monkeypatch)
    monkeypatch.setattr(triton_rule, "INTERPRETED", True)
    assert rule() == triton_rule.PLAIN
    with pytest.raises(ValueError, match="they do not run in Triton's interpreter"):
        rule("gluon")


def test_another_triton_runs_the_portable_kernels_and_says_so_once(monkeypatch):
    rule = hopper(monkeypatch, "3.10.1")
    said = r"tested with Triton 3\.6, 3\.7, 3\.8, 3\.9, this is 3\.10\.1: pin torch 2\.15, .* the portable kernels run"
    with pytest.warns(RuntimeWarning, match=said):
        assert rule() == triton_rule.PLAIN
    assert rule() == triton_rule.PLAIN  # a second warning would be an error here
    with pytest.raises(RuntimeError, match=r'impl="gluon" cannot run here: .* this is 3\.10\.1: pin torch'):
        rule("gluon")
    assert rule("triton_plain") == rule(size=72) == triton_rule.PLAIN


@pytest.mark.parametrize("version", ["3.6.0", "3.6.3+git", "3.7.0", "3.9.0.post1"])
def test_a_patch_number_does_not_matter(version):
    assert triton_versions.objection(version) is None


def test_an_amd_gpu_is_no_hopper(monkeypatch):
    """MI200 says that its compute capability is 9.0."""
    rule = hopper(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert rule() == triton_rule.PLAIN


def test_a_gpu_before_ampere_is_named(monkeypatch):
    hopper(monkeypatch)
    monkeypatch.setattr(triton_rule, "capability", lambda index: (7, 5))
    q = SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(10, 4, 64), device=torch.device("cuda:0"))
    message = r'impl="triton" needs a GPU of compute capability 8\.0 .* cuda:0 has 7\.5; impl="reference" runs anywhere'
    with pytest.raises(RuntimeError, match=message):
        triton_rule.check("triton", q, q)


@pytest.mark.parametrize(
    "broken",
    [ModuleNotFoundError("no triton"), ImportError("old"), OSError("libtriton.so"), AttributeError("x")],
    ids=repr,
)
def test_a_triton_that_cannot_be_imported(monkeypatch, broken):
    """Missing (CPU builds of torch, macOS, Windows), or broken in whatever way."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "treepack.attention.call":
                raise broken

    monkeypatch.delitem(sys.modules, "treepack.attention.call", raising=False)
    monkeypatch.delattr(sys.modules["treepack.attention"], "call", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    q = torch.zeros(1, 2, 8, 64)
    message = r'needs the package triton, 3\.6 or newer, .*impl="reference" needs torch alone'
    with pytest.raises(ImportError, match=message) as raised:
        tree_attention(q, q, q, subtree_end=torch.arange(1, 9, dtype=torch.int32), impl="triton")
    assert isinstance(raised.value, ModuleNotFoundError) == isinstance(broken, ModuleNotFoundError)


def test_impl_gluon_on_the_cpu_says_what_it_needs():
    q = torch.zeros(1, 2, 8, 64)
    end = torch.arange(1, 9, dtype=torch.int32)
    for impl in ("gluon", "triton_plain"):
        with pytest.raises(RuntimeError, match=f'impl="{impl}" needs a GPU, q is on cpu'):
            tree_attention(q, q, q, subtree_end=end, impl=impl)


def recorded_kernel(gluon_launch, log):
    """A `_Kernel` whose function compiles nothing and writes down how it is launched."""

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: log.append(("again", grid, arguments))

    class Function:
        def __getitem__(self, grid):
            def first(*arguments, **options):
                log.append(("first", grid, arguments, options))
                return Compiled()

            return first

    return gluon_launch._Kernel(Function())


def test_a_compilation_is_made_once_for_what_its_key_holds():
    """Triton compiles at the first call of a dtype, head size and form; later calls launch what it gave, in the order
    of the kernel's arguments."""
    gluon_launch = pytest.importorskip("treepack.attention.hopper.launch")
    log = []
    kernel = recorded_kernel(gluon_launch, log)
    half, single = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16)
    for like, size in ((half, 64), (half, 64), (half, 128), (single, 64), (single, 64)):
        kernel.launch(3, like, [like, 7], {"D": size, "STAGES": 2})
    assert [entry[0] for entry in log] == ["first", "again", "first", "first", "again"]
    assert log[0][3] == {"D": 64, "STAGES": 2, "num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
    assert log[1][1:] == ((3, 1, 1), (half, 7, 64, 2))


def test_an_unknown_launch_is_left_to_triton(monkeypatch):
    gluon_launch = pytest.importorskip("treepack.attention.hopper.launch")
    monkeypatch.setattr(gluon_launch, "KNOWN", False)
    log = []
    kernel = recorded_kernel(gluon_launch, log)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gluon_launch.table.matrix(64, x.dtype)
    for _ in range(2):
        kernel.launch(3, x, [gluon_launch._Descriptor(x, [64, 64], [64, 1], [64, 64], layout)], {"D": 64})
    assert [entry[0] for entry in log] == ["first", "first"]
    assert [type(entry[2][0]) for entry in log] == [gluon_launch.TensorDescriptor] * 2


@pytest.mark.parametrize("version", tritons.VERSIONS)
def test_the_launch_path_of_each_triton(version):
    """Its launcher makes the same of a bare descriptor as of Triton's own, and what is not as known is seen."""
    command = [sys.executable, str(ROOT / "tests" / "descriptors_worker.py")]
    done = subprocess.run(command, env=tritons.environment(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"triton": version, "known": True, "same": True, "filled": 1, "more": False, "other": False}


def test_what_the_key_leaves_out_is_not_specialised_on():
    """Every argument that is neither a constant, nor a descriptor or float, is kept from Triton's specialisation."""
    table = pytest.importorskip("treepack.attention.hopper.table")
    for name, size, dtype, variant in table.variants(["forward", "dq", "dkv"], [(64, 64)], ["fp16"]):
        kernel, constants, descriptors = table.describe(name, size, dtype, variant)
        for param in kernel.params:
            if param.is_constexpr:
                assert param.name in constants
            elif param.name not in (*descriptors, "scale", "grad_scale", "cap", "depth_desc"):
                assert param.do_not_specialize or param.do_not_specialize_on_alignment, (name, param.name)


def test_layouts_that_descriptors_read():
    columns = torch.zeros(50, 4, 64, dtype=torch.bfloat16)
    rows = torch.zeros(4, 50, 64, dtype=torch.bfloat16).transpose(0, 1)
    fused = torch.zeros(50, 12, 64, dtype=torch.bfloat16)[:, 4:8]
    assert triton_common.matrix_view(columns) == ([50, 256], 256, triton_common.COLUMNS)
    assert triton_common.matrix_view(rows) == ([200, 64], 64, triton_common.ROWS)
    assert triton_common.matrix_view(fused) == ([50, 256], 768, triton_common.COLUMNS)
    latent = torch.zeros(50, 4, 128 + 64, dtype=torch.bfloat16)[..., 128:]  # the values beside the keys of each head
    assert triton_common.matrix_view(latent, apart=True) == ([50, 3 * 192 + 64], 768, triton_common.APART)
    assert triton_common.matrix_view(latent) is None
    assert triton_common.matrix_view(columns, apart=True) == triton_common.matrix_view(columns)
    padded = torch.zeros(50, 4, 128 + 80, dtype=torch.bfloat16)[..., 128:]  # a tile would reach between the heads
    assert triton_common.matrix_view(padded, apart=True) is None
    for other in (
        torch.zeros(4, 64, 50, dtype=torch.bfloat16).permute(2, 0, 1),  # the head size is not innermost
        torch.zeros(50 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(50, 4, 64),  # rows do not start on 16 bytes
        torch.zeros(50, 4, 64, dtype=torch.bfloat16)[:, :1].expand(50, 4, 64),  # heads that are one
    ):
        assert triton_common.matrix_view(other, apart=True) is None


def trees():
    """(name, subtree_end) of shapes that stress the lists."""
    yield "chain", forests.layout(forests.chain(700)).subtree_end
    yield "one token", np.array([1], np.int32)
    yield "padding only", np.arange(300, dtype=np.int32)
    yield "agent", forests.layout(forests.agent(2, 5, 400, 90), padding=50).subtree_end
    yield "a run between branches", forests.layout([(300, [(400, []), (300, [(500, []), (300, [])])])]).subtree_end
    for seed in range(12):
        nests = forests.random_nests(random.Random(seed), 200 + 97 * seed)
        yield f"drawn {seed}", forests.layout(nests, padding=31 * (seed % 4)).subtree_end


def walk(rows, items, tile):
    """The kernels' `tile_list` and `next_tile` in Python: (key tiles in order, how many of them are masked)."""
    start, runs, fulls, partials = (int(x) for x in rows[tile])
    last = max(start + 2 * runs + partials - 1, 0)
    seen = partials > 0 and int(items[last]) == tile
    total, masked = (partials + fulls, partials) if seen else (1, 1)
    order, n, run = [tile], tile, start
    for i in range(total - 1):
        listed = int(items[last - min(i + 1, masked - 1)])
        inside = i + 1 > masked
        ended = n + 1 == int(items[run + 1])
        run += 2 if inside and ended else 0
        fresh = int(items[run])
        n = listed if i + 1 < masked else (n + 1 if inside and not ended else fresh)
        order.append(n)
    return order, masked


@pytest.mark.parametrize(("name", "end"), list(trees()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_walk_visits_every_visible_tile_once(name, end):
    """... the diagonal first, what needs a mask before what does not, and reads no number outside the lists."""
    n = len(end)
    rows, items = (x.numpy() for x in tree_tiles(torch.from_numpy(end)).lists(128))
    real = np.arange(n) < end
    sees = (np.arange(n)[None] <= np.arange(n)[:, None]) & (np.arange(n)[:, None] < end[None]) & real[:, None]
    for tile in range(-(-n // 128)):
        order, masked = walk(rows, items, tile)
        assert order[0] == tile
        visible = [k for k in range(tile + 1) if sees[tile * 128 : tile * 128 + 128, k * 128 : k * 128 + 128].any()]
        assert sorted(order) == (visible or [tile])
        for k in order[1:masked]:
            assert k < tile  # so that `m < subtree_end[n]` is the whole mask
        for k in order[masked:]:
            assert sees[tile * 128 : min(tile * 128 + 128, n), k * 128 : k * 128 + 128].all()


@pytest.mark.parametrize(("name", "end"), list(trees()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_schedule(name, end):
    """Both orders are permutations, the longest first; a key tile's range holds every query that sees one of its keys,
    and what dK/dV leaves unmasked is seen in full."""
    n = len(end)
    tiles = tree_tiles(torch.from_numpy(end))
    schedule, rows = tiles.schedule().numpy(), tiles.lists(128)[0].numpy()
    count = -(-n // 128)
    assert schedule.shape == (count, 4)
    assert schedule.dtype == np.int32
    assert sorted(schedule[:, 0]) == sorted(schedule[:, 1]) == list(range(count))
    lengths = (rows[:, 2] + rows[:, 3])[schedule[:, 0]]
    assert (np.diff(lengths) <= 0).all()
    ranges = (schedule[:, 2] - 128 * np.arange(count))[schedule[:, 1]]
    assert (np.diff(ranges) <= 0).all()
    real = np.arange(n) < end
    for key, (_, _, largest, smallest) in enumerate(schedule):
        part = slice(128 * key, min(128 * key + 128, n))
        assert largest == max([0, *end[part][real[part]]])
        assert smallest == min(end[part])
    assert tiles.schedule() is tiles.schedule()  # once for all layers


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (12, 2), (7, 1), (64, 8)])
@pytest.mark.parametrize("split", [None, False, True])
@pytest.mark.parametrize(("name", "end"), list(trees()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_items_of_the_backward(name, end, heads, kv_heads, split):
    """Every query head meets every key tile once, the longest item comes first, and only what would keep one of the
    multiprocessors busy longer than the others is split."""
    processors, group = 6, heads // kv_heads
    schedule = tree_tiles(torch.from_numpy(end)).schedule()
    items = backward_items(schedule, heads, kv_heads, processors, split)
    assert items.dtype == torch.int32
    count, by_length = len(schedule), schedule[:, 1].tolist()
    steps = {t: -(-max(0, int(schedule[t, 2]) - 128 * t) // 64) for t in range(count)}
    seen, costs, splits = [], [], set()
    for value in items[1:].tolist():
        if value >= 0:
            tile, hk = divmod(value, kv_heads)
            seen += [(tile, hk * group + g) for g in range(group)]
            costs.append(steps[tile] * group)
        elif value != NO_ITEM:
            slot, head = divmod(-1 - value, heads)
            seen.append((by_length[slot], head))
            costs.append(steps[by_length[slot]])
            splits.add(by_length[slot])
    assert sorted(seen) == [(tile, head) for tile in range(count) for head in range(heads)]
    assert costs == sorted(costs, reverse=True)
    assert set(by_length[: items[0]]) == splits
    assert len(splits) <= most_split(count, heads, kv_heads, processors, split)
    share = sum(steps.values()) * heads / processors
    wanted = {t for t in steps if group * steps[t] > 1.1 * share} if split is None else set(steps) if split else set()
    assert splits == (wanted if group > 1 else set())


@pytest.mark.parametrize("above", [0, 128])
@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize(("name", "end"), list(trees()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_schedule_of_a_window(name, end, window, above):
    """The lists of dK/dV hold every tile of 128 keys and 64 queries with a pair in the window, once; what they leave
    unmasked is seen in full; the items come from their lengths."""
    n = len(end)
    if above >= n:
        return
    made = tree_tiles(torch.from_numpy(end))
    made.above = above
    depth, tiles = made.depth().numpy(), -(-n // 128)
    words = made.schedule(window).numpy()
    schedule, lists, items = (
        words[: 4 * tiles].reshape(-1, 4),
        words[4 * tiles : 8 * tiles].reshape(-1, 4),
        words[8 * tiles :],
    )
    rows, index = made.lists(128, window)[0].numpy(), np.arange(n)
    assert sorted(schedule[:, 0]) == sorted(schedule[:, 1]) == list(range(tiles))
    queries = schedule[: tiles - above // 128, 0]
    assert (np.diff((rows[:, 2] + rows[:, 3])[queries]) <= 0).all()
    sees = (index[None] <= index[:, None]) & (index[:, None] < end[None]) & (index < end)[:, None]
    sees &= depth[:, None] - depth[None] < window
    seen_tiles = []
    for tile, (start, runs, fulls, partials) in enumerate(lists):
        full = [t for i in range(runs) for t in range(*items[start + 2 * i : start + 2 * i + 2])]
        partial = items[start + 2 * runs : start + 2 * runs + partials].tolist()
        assert len(full) == fulls
        assert len({*full, *partial}) == len(full) + len(partial)
        keys = slice(128 * tile, 128 * tile + 128)
        for t in range(above // 64, -(-n // 64)):
            pairs = sees[64 * t : 64 * t + 64, keys]
            assert t in full or t in partial or not pairs.any()
            assert t not in full or pairs.all()
        seen_tiles.append(fulls + partials)
    assert ((schedule[:, 2] - np.maximum(128 * np.arange(tiles), above)) // 64).tolist() == seen_tiles
    assert (np.diff(np.array(seen_tiles)[schedule[:, 1]]) <= 0).all()
    assert made.schedule(window) is made.schedule(window)
    capacity = torch.ops.treepack.window_schedule  # the operator's shape without a run: the same
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(torch.from_numpy(x.copy())) for x in (end.astype(np.int32), depth, rows)]
        assert capacity(fake[0], fake[1], window, fake[2], above).shape == words.shape
    groups = made.dkv_items(4, 2, window)
    assert groups.dtype == torch.int32


def test_the_items_of_a_shared_prompt():
    """Two key tiles of a prompt that 40 short answers share are split, the answers are not."""
    end = forests.layout([(256, [(100, [])] * 40)]).subtree_end
    tiles = tree_tiles(torch.from_numpy(end))
    items = backward_items(tiles.schedule(), 8, 2, 24)
    assert items[0] == 2
    # 67 query tiles of 64 see the prompt's tiles; an item of the answers has at most 4 x 4 of them.
    assert items[1:17].tolist() == [-1 - i for i in range(16)]
    assert (items[17:] >= 0).sum() == 2 * (len(tiles.schedule()) - 2)
