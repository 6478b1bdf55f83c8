"""A JSON file that is one array, or one object over several lines, reads as the same rows on lines do."""

import gzip
import io
import json
import tracemalloc

import pytest

from treepack.readers import ReadError, elements, jsonl, open_rollouts

ROWS = [
    {"input_ids": [1, 2, 3], "reward": 0.5, "note": 'a "quoted" \\ }]{[, \u00e9 \U0001f600 text'},
    {"input_ids": [4], "reward": -1e-3, "note": ""},
    {"input_ids": list(range(40)), "reward": 12345678, "note": "x" * 300},
]


def read(path, samples=1024, start=0):
    return [sample for batch in open_rollouts(path).batches(samples, start=start) for sample in batch]


def plain(samples):
    return [(sample["input_ids"].tolist(), sample["reward"]) for sample in samples]


EXPECTED = [(row["input_ids"], row["reward"]) for row in ROWS]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_every_cut_of_the_text_gives_the_same(tmp_path, monkeypatch, indent, ascii, block):
    """Blocks of any size: words, escapes and letters of several bytes are torn apart at every place."""
    monkeypatch.setattr(elements, "BLOCK", block)
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=indent, ensure_ascii=ascii).encode() + b"\n ")
    assert plain(read(path)) == EXPECTED
    assert plain(read(path, samples=1, start=1)) == EXPECTED[1:]
    got = list(elements.elements(io.BytesIO(path.read_bytes()).read, "x"))
    assert [value for value, _ in got] == ROWS


def test_names_of_files(tmp_path):
    text = json.dumps(ROWS).encode()
    for name in ("rows.json", "rows.jsonl"):
        (tmp_path / name).write_bytes(text)
        assert plain(read(tmp_path / name)) == EXPECTED
    (tmp_path / "ROWS.JSON.GZ").write_bytes(gzip.compress(text))
    assert plain(read(tmp_path / "ROWS.JSON.GZ")) == EXPECTED
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(text))
    opened = open_rollouts(tmp_path / "rows.json.gz")
    assert plain(sample for batch in opened.batches() for sample in batch) == EXPECTED
    assert (opened.format, opened.size, opened.fraction) == ("jsonl", None, 1.0)


def test_objects_over_several_lines(tmp_path):
    """What `json.dump(indent=2)` writes of one object, or of some after each other; lines of objects stay lines."""
    for rows in (ROWS[:1], ROWS):
        (tmp_path / "one.json").write_text("\n".join(json.dumps(row, indent=2) for row in rows))
        assert plain(read(tmp_path / "one.json")) == EXPECTED[: len(rows)]
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, ROWS)))
    assert isinstance(jsonl.open_json(tmp_path / "lines.json"), jsonl.JsonLines)
    assert plain(read(tmp_path / "lines.json")) == EXPECTED


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(elements, "BLOCK", 1 << 14)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 1 << 16)
    row = json.dumps({"input_ids": [7, 8, 9], "traj": [{"role": "user", "content": "word " * 800}]})
    peaks = []
    for count in (500, 2000):
        path = tmp_path / f"{count}.json"
        with path.open("w") as file:
            file.write("[" + ",\n".join([row] * count) + "]")
        assert path.stat().st_size > 4000 * count
        tracemalloc.start()
        assert sum(len(batch) for batch in open_rollouts(path).batches()) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1_000_000  # of a file of 8 MB
    assert peaks[1] < 1.3 * peaks[0]


def test_a_broken_element_is_found_where_it_is(tmp_path, monkeypatch):
    """Not after the rest of the file was read for it."""
    monkeypatch.setattr(elements, "BLOCK", 100)
    text = "[" + json.dumps(ROWS[0]) + ', {"input_ids": [1, }, ' + ", ".join([json.dumps(ROWS[1])] * 1000) + "]"
    file = io.BytesIO(text.encode())
    with pytest.raises(ReadError, match=r"x, element 1: not JSON: .* at letter \d+"):
        list(elements.elements(file.read, "x"))
    assert file.tell() < 2000
    monkeypatch.setattr(elements, "LARGEST", 3000)
    text = "[[" + "1, " * 5000
    with pytest.raises(ReadError, match="x, element 0: not JSON: it has more than 3,000 letters"):
        list(elements.elements(io.BytesIO(text.encode()).read, "x"))
