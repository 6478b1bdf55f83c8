"""The border between Rust and Python: the GIL, the memory, pickles, and who may name what."""

import copy
import dataclasses
import gc
import itertools
import multiprocessing
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import arrays_of, image

import treepack

RUST = Path(__file__).parent.parent / "rust"


def samples(seed=0, count=40, length=300):
    """Rollouts with every kind of column: half of each sample is shared."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 1000, length // 2)
    out = []
    for s in range(count):
        ids = np.concatenate([prompt, rng.integers(0, 1000, length - length // 2)])
        counts = np.ones(length, np.int32)
        more = {"sampling_mask": ids.astype(np.int32), "sampling_mask_counts": counts, "advantage": float(s)}
        logp = rng.random(length, dtype=np.float32)
        out.append({"input_ids": ids, "old_log_probs": logp, "table": rng.random((length, 3)), **more})
    return out


def everything(tree):
    """All arrays of a tree, gathered columns included."""
    out = arrays_of(tree)
    out.update({f"terms.{name}": tree.terms[name] for name in tree.terms})
    out.update({f"samples.{name}": tree.samples[name] for name in tree.samples})
    return out


def copies(tree):
    return {name: array.copy() for name, array in everything(tree).items()}


def assert_intact(tree, before):
    for name, array in everything(tree).items():
        assert np.array_equal(array, before[name]), name


# ---------------------------------------------------------------------------------------------------------- the GIL


def test_another_thread_runs_while_packing():
    """With a switch interval of minutes a thread gets the GIL only from a call that lets go of it."""
    length, repeats = 100_000, 200
    ids = np.tile(np.arange(length), (repeats, 1))
    mask = np.zeros(length, np.uint8)
    # Ready to be borrowed as they are, so that NumPy, which lets go of the GIL too, has nothing to do.
    given = [{"input_ids": row, "completion_mask": mask} for row in ids]
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)  # hands the GIL back

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    sys.setswitchinterval(600.0)
    try:
        thread.start()
        for _ in range(20):  # a busy machine may keep the other thread off the processor for a whole call
            start = time.perf_counter()
            packed = treepack.pack(given, max_tokens=length)
            end = time.perf_counter()
            # The middle of the call: argument checks and wrapping up may let other threads in, the packing must.
            low, high = start + 0.25 * (end - start), start + 0.75 * (end - start)
            inside = sum(low < x < high for x in ticks)
            assert packed[0].num_tokens == length
            if inside >= 10:
                break
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert inside >= 10


def test_threads_pack_at_the_same_time():
    """Calls from several threads share the pool of memory and never each other's."""
    wanted = {seed: [copies(t) for t in treepack.pack(samples(seed), max_tokens=3000)] for seed in range(4)}
    wrong = []

    def work(seed):
        given = samples(seed)
        for _ in range(30):
            for tree, before in zip(treepack.pack(given, max_tokens=3000), wanted[seed], strict=True):
                if not all(np.array_equal(array, before[name]) for name, array in everything(tree).items()):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_thread_packs_other_columns_meanwhile(monkeypatch):
    """What the columns look like is remembered from call to call: each call goes by what it started with."""
    narrow = [{"input_ids": np.array([1, 2]), "weight": np.array([1, 5], np.int16)}]
    wide = [{"input_ids": np.array([1, 2]), "other": np.array([0.5, 0.25])}]
    treepack.pack(narrow, max_tokens=8)
    pack_ready = treepack._core.pack_ready
    answers = []

    def interrupted(*arguments):
        if not answers:
            answers.append(None)
            thread = threading.Thread(target=lambda: treepack.pack(wide, max_tokens=8))
            thread.start()
            thread.join()
        answers.append(pack_ready(*arguments))
        return answers[-1]

    monkeypatch.setattr(treepack._core, "pack_ready", interrupted)
    (tree,) = treepack.pack(narrow, max_tokens=8)
    assert answers[-1] is not None, "the columns were ready: this is the way in which they are remembered"
    assert tree.terms["weight"].dtype == np.int16
    assert tree.terms["weight"].tolist() == [5]


@pytest.mark.parametrize("hole", [False, True])
def test_threads_share_one_padded_batch(hole):
    rng = np.random.default_rng(0)
    real = np.arange(400) < rng.integers(1, 400, 60)[:, None]
    real[7, :4] = [True, True, not hole, True]
    names = ("input_ids", "completion_mask", "weight")
    batch = {name: rng.integers(0, 2, real.shape) for name in names} | {"attention_mask": real}
    wanted = [copies(tree) for tree in treepack.pack(batch, max_tokens=3000)]
    wrong = []

    def work():
        for _ in range(20):
            for tree, before in zip(treepack.pack(batch, max_tokens=3000), wanted, strict=True):
                wrong.extend(n for n, array in everything(tree).items() if not np.array_equal(array, before[n]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------------------------------------------ the memory


@pytest.mark.parametrize("branching", ["token", "label"])
def test_every_array_is_an_aligned_view_of_one_buffer(branching):
    packed = treepack.pack(samples(), max_tokens=3000, branching=branching, pad_to_multiple_of=64)
    assert len(packed) > 1
    spans = []
    for tree in packed:
        buffer = tree.buffer
        assert buffer.dtype == np.uint8
        assert buffer.ndim == 1
        assert buffer.nbytes > 0
        start = buffer.ctypes.data
        inside = []
        for name, array in everything(tree).items():
            assert np.shares_memory(array, buffer), name
            at = array.ctypes.data
            assert at % 64 == 0, name
            assert array.flags.c_contiguous, name
            assert start <= at <= at + array.nbytes <= start + buffer.nbytes, name
            inside.append((at, at + array.nbytes, name))
        inside.sort()
        for (_, end, one), (begin, _, two) in itertools.pairwise(inside):
            assert end <= begin, (one, two)  # no two arrays overlap
        used = sum(end - begin for begin, end, _ in inside)
        assert buffer.nbytes <= 2 * used + 64 * 64  # and the buffer is theirs, with little air between
        spans.append((start, start + buffer.nbytes))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_arrays_are_the_same_memory_each_time_they_are_asked_for():
    (tree,) = treepack.pack(samples(count=3), max_tokens=3000)
    for name in everything(tree):
        one, two = everything(tree)[name], everything(tree)[name]
        assert one.ctypes.data == two.ctypes.data, name


def test_views_outlive_their_result_and_later_calls():
    views, before = [], []
    for seed in range(3):
        for tree in treepack.pack(samples(seed), max_tokens=3000):
            for array in everything(tree).values():
                views.append(array[:: 2 if len(views) % 2 else 1])  # a view of a view holds the memory too
                before.append(views[-1].copy())
    del tree, array
    gc.collect()
    for seed in range(10, 30):
        treepack.pack(samples(seed), max_tokens=3000)
    assert all(np.array_equal(view, copy) for view, copy in zip(views, before, strict=True))


@pytest.mark.parametrize("name", ["input_ids", "subtree_end", "term_source", "sampling_mask", "terms", "buffer"])
def test_one_view_alone_keeps_its_memory(name):
    (tree,) = treepack.pack(samples(count=8), max_tokens=3000)
    view = tree.terms["old_log_probs"] if name == "terms" else getattr(tree, name)
    before, span = view.copy(), np.array([view.ctypes.data, view.ctypes.data + view.nbytes])
    del tree
    gc.collect()
    for seed in range(1, 20):
        for other in treepack.pack(samples(seed, count=8), max_tokens=3000):
            start = other.buffer.ctypes.data
            assert start >= span[1] or start + other.buffer.nbytes <= span[0]
    assert np.array_equal(view, before)


def test_the_pool_takes_memory_back_after_the_last_view():
    """The same call again and again lives in the same few places, and no longer while someone looks."""
    places = []
    for _ in range(10):
        (tree,) = treepack.pack(samples(count=8), max_tokens=3000)
        places.append(tree.buffer.ctypes.data)
        del tree
        gc.collect()
    assert len(set(places[2:])) < 8
    kept = [treepack.pack(samples(count=8), max_tokens=3000)[0].input_ids for _ in range(10)]
    assert len({x.ctypes.data for x in kept}) == 10


def test_the_result_does_not_change_with_its_input():
    given = samples(count=4)
    (tree,) = treepack.pack(given, max_tokens=3000)
    before = copies(tree)
    for sample in given:
        for value in sample.values():
            if isinstance(value, np.ndarray):
                assert not any(np.shares_memory(value, array) for array in everything(tree).values())
                value[...] = 1
    assert_intact(tree, before)


# --------------------------------------------------------------------------------------------------------- pickles


def test_pack_error_is_importable_and_pickles():
    error = treepack.PackError
    assert issubclass(error, ValueError)
    assert error.__name__ == "PackError"
    assert getattr(sys.modules[error.__module__], error.__qualname__) is error
    with pytest.raises(error) as caught:
        treepack.pack([{"input_ids": []}], max_tokens=8)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is error
    assert again.args == caught.value.args
    assert str(again) == str(caught.value)


def _in_a_worker(max_tokens):
    return treepack.pack(samples(count=4), max_tokens=max_tokens)[0]


def test_trees_and_errors_come_back_from_a_worker_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tree = pool.apply(_in_a_worker, (3000,))
        with pytest.raises(treepack.PackError, match=r"sample 0\b"):
            pool.apply(_in_a_worker, (10,))
    (here,) = treepack.pack(samples(count=4), max_tokens=3000)
    assert_intact(tree, copies(here))


def test_pickled_trees_are_whole():
    packed = treepack.pack(samples(), max_tokens=3000, branching="label", pad_to_multiple_of=32)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        for tree in packed:
            again = pickle.loads(pickle.dumps(tree, protocol))
            assert_intact(again, copies(tree))
            assert set(everything(again)) == set(everything(tree))
            assert all(np.shares_memory(array, again.buffer) for array in everything(again).values())
            assert again.num_tokens == tree.num_tokens
            assert np.array_equal(again.attention_mask(), tree.attention_mask())


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("read", [False, True])
def test_a_whole_packing_pickles(again, read):
    call = {"max_tokens": 2000, "ranks": 2, "overlong": "skip"}
    rows = samples() + samples(count=1, length=2500)
    packed = treepack.pack(rows, **call)
    if read:
        packed.stats, packed[0]
    other = again(packed)
    del packed
    gc.collect()
    expected = treepack.pack(rows, **call)
    assert len(expected) > 2
    assert image(other) == image(expected)
    assert [x.sample for x in other.skipped] == [40]
    assert other.skipped == expected.skipped
    assert other.ranks == 2
    assert [t.sample_index.tolist() for t in other.for_rank(1)] == [
        t.sample_index.tolist() for t in expected.for_rank(1)
    ]
    assert dataclasses.replace(other.stats, milliseconds={}) == dataclasses.replace(expected.stats, milliseconds={})
    assert repr(other) == repr(expected)
    assert image(pickle.loads(pickle.dumps(other))) == image(expected)  # and once more


# ------------------------------------------------------------------------------------------------- who names what


def test_one_rust_file_names_python():
    assert RUST.is_dir()
    naming = set()
    for path in sorted(RUST.rglob("*.rs")):
        code = re.sub(r"//.*", "", path.read_text())
        if re.search(r"\b(pyo3|numpy)\b", code):
            naming.add(path.relative_to(RUST).as_posix())
    assert naming == {"python.rs"} or (naming and all(name.startswith("python/") for name in naming)), naming


def test_importing_treepack_needs_numpy_alone():
    code = (
        "import sys, treepack; treepack.pack([{'input_ids': [1, 2]}], max_tokens=8);"
        "print([x for x in ('torch', 'triton', 'transformers', 'pandas') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there():
    for name in ("pack", "Packed", "PackedTree", "PackError"):
        assert hasattr(treepack, name)
        assert name in treepack.__all__
    assert isinstance(treepack.pack([], max_tokens=8), treepack.Packed)
    (tree,) = treepack.pack([{"input_ids": [1]}], max_tokens=8)
    assert isinstance(tree, treepack.PackedTree)
