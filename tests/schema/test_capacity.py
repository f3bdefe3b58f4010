"""How many ranks a machine or a container runs, and the refusal of more before any starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from archon.schema.capacity import cores, memory_bytes, rank_limit
from archon.schema.errors import LayoutError
from archon.tools.check.rank_pool import Pool

GIB = 2**30


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def control_groups(root: Path, membership: str, **limits: str) -> Path:
    """A root folder with the control groups of this process; `limits` by path, with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, value in limits.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


VERSION_1 = "12:memory:/docker/x\n5:cpu,cpuacct:/docker/x\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "limits", "processors", "gib", "ranks"),
    [
        ("0::/\n", {"memory_DOT_max": "max", "cpu_DOT_max": "max 100000"}, 2, 64, 16),
        ("0::/\n", {"memory_DOT_max": f"{GIB}", "cpu_DOT_max": "max 100000"}, 2, 1, 4),
        ("0::/\n", {"memory_DOT_max": "max", "cpu_DOT_max": "150000 100000"}, 1.5, 64, 12),
        ("0::/\n", {"memory_DOT_max": "1000", "cpu_DOT_max": "1000 100000"}, 0.01, 1000 / GIB, 1),
        # The smallest limit of a group and its parents counts, as under systemd and Slurm.
        ("0::/a/b\n", {"a__memory_DOT_max": f"{GIB}", "a__b__memory_DOT_max": f"{2 * GIB}"}, 2, 1, 4),
        ("0::/a/b\n", {"a__cpu_DOT_max": "200000 100000", "a__b__cpu_DOT_max": "50000 100000"}, 0.5, 64, 4),
        # Inside a container the own group is the top folder; its path is the one of the host.
        (
            VERSION_1,
            {
                "memory__memory_DOT_limit_in_bytes": f"{GIB}",
                "cpu,cpuacct__cpu_DOT_cfs_quota_us": "100000",
                "cpu,cpuacct__cpu_DOT_cfs_period_us": "100000",
            },
            1,
            1,
            4,
        ),
        (
            VERSION_1,
            {
                "memory__memory_DOT_limit_in_bytes": "9223372036854771712",
                "cpu,cpuacct__docker__x__cpu_DOT_cfs_quota_us": "-1",
                "cpu,cpuacct__docker__x__cpu_DOT_cfs_period_us": "100000",
            },
            2,
            64,
            16,
        ),
        ("0::/gone\n", {}, 2, 64, 16),
    ],
)
def test_limits_of_a_container_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    limits: dict[str, str],
    processors: float,
    gib: float,
    ranks: int,
) -> None:
    pages = 64 * GIB // os.sysconf("SC_PAGE_SIZE")
    real: Callable[[str], int] = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else real(name))
    root = control_groups(tmp_path, membership, **limits)
    assert (cores(root), memory_bytes(root) / GIB, rank_limit(root)) == (processors, gib, ranks)
    assert (cores(tmp_path / "mac"), memory_bytes(tmp_path / "mac")) == (2, 64 * GIB), "without control groups"


def test_ranks_beyond_the_limit_exit_before_they_load_torch() -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "100000"}
    said = []
    for rank in ("0", "7"):
        code = "import sys; from archon.cli import main\ntry: main(['models'])\nfinally: print('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | {"LOCAL_RANK": rank}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (2, "False\n")
        said.append(done.stderr)
    assert "100000 ranks do not fit this machine" in said[0] and said[0].count("\n") == 1
    assert said[1] == "", "only rank 0 reports"


def test_a_pool_of_more_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="100000 ranks do not fit this machine, which runs at most"):
        Pool(100000)
