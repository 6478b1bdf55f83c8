"""What a release rests on: one version everywhere, workflows that build what is promised and may do little."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="workflow files are read by pyyaml")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs():
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            yield pytest.param(job, id=f"{path.stem}-{name}")


def version():
    return re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_one_version():
    package = (ROOT / "python" / "treepack" / "_version.py").read_text(encoding="utf-8")
    assert f'__version__ = "{version()}"' in package
    lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    assert f'name = "treepack"\nversion = "{version()}"' in lock


def test_the_changelog_knows_the_version_or_has_it_ahead():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0].startswith(f"{version()} ")


def test_the_command_of_the_sdist_job_reads_the_version():
    """`sed -n 's/^version = .../p' Cargo.toml` must give one line."""
    step = (FOLDER / "release.yml").read_text(encoding="utf-8")
    assert r's/^version = "\(.*\)"$/\1/p' in step
    assert len(re.findall(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)) == 1


def test_continuous_integration_runs_the_target_of_developers():
    runs = [step.get("run") for step in load(FOLDER / "ci.yml")["jobs"]["test"]["steps"]]
    assert "make test" in runs
    assert "exec make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_is_allowed_by_default(path):
    assert load(path)["permissions"] == {}


@pytest.mark.parametrize("job", list(jobs()))
def test_a_job_may_read_and_has_an_end(job):
    assert set(job["permissions"].items()) <= {("contents", "read"), ("id-token", "write")}
    assert job["timeout-minutes"] <= 90
    for step in job["steps"]:
        if "uses" in step:
            action, pin = step["uses"].split("@")
            assert re.fullmatch(r"v\d+|release/v\d+|[0-9a-f]{40}", pin), step["uses"]
            if action == "actions/checkout":
                assert step["with"]["persist-credentials"] is False


def test_only_a_tag_publishes_and_only_what_was_tested():
    found = {name: job for path in WORKFLOWS for name, job in load(path)["jobs"].items()}
    with_token = [name for name, job in found.items() if "id-token" in job["permissions"]]
    assert with_token == ["publish"]
    publish = found["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["needs"] == ["wheel", "sdist"]
    assert publish["environment"] == "pypi"
    for name in publish["needs"]:
        assert any("@tests/wheel_tests.txt" in step.get("run", "") for step in found[name]["steps"])


def test_every_platform_is_built():
    matrix = load(FOLDER / "release.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    assert {platform["name"] for platform in matrix["platform"]} == {
        "linux-x86_64",
        "linux-aarch64",
        "macos-x86_64",
        "macos-aarch64",
        "windows-x86_64",
    }
    oldest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    kinds = {kind["name"]: kind for kind in matrix["kind"]}
    assert kinds["abi3"]["python"] == oldest
    assert f"abi3-py{oldest.replace('.', '')}" in (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    assert kinds["free-threaded"]["python"].endswith("t")


def test_the_tests_of_a_wheel_need_no_torch():
    listed = (ROOT / "tests" / "wheel_tests.txt").read_text(encoding="utf-8").split()
    assert len(listed) > 5
    left_out = [name for name in listed if name.startswith("--deselect=")]
    for name in left_out:  # times, which a shared runner does not keep
        path, test = name.removeprefix("--deselect=").split("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
    for name in set(listed) - set(left_out):
        source = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"^(import|from) (torch|transformers|trl|pyarrow|datasets)\b", source, re.MULTILINE), name
