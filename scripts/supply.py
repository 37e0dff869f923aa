"""Look for secrets in the tracked files, and for known vulnerabilities in the locked packages.

The second part asks the package index through ``pip-audit``; where it is not installed, or the
index does not answer, it says so and passes. Exit status 1: a secret or a vulnerability was found.

    python scripts/supply.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SECRETS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})\b",
    "a key of an LLM service": r"\bsk-[A-Za-z0-9_-]{20,}\b",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "a web token": r"\beyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s:/@\"'{}]+:[^\s:/@\"'{}]{3,}@",
    "a value that is called a secret": (
        r"(?i)\b[a-z_]*(?:password|passwd|api_?key|auth_?token|access_?token|secret_?key)"
        r"[\"']?\s*[:=]\s*[\"'][^\"'\s{}]{8,}[\"']"
    ),
}
"""What secrets look like."""

NAMES = (
    r"(^|/)(secret/|\.env$|\.netrc$|id_(rsa|ed25519)$|credentials(\.json)?$)|\.(pem|p12|pfx|kdbx)$"
)
"""Files that are not to be tracked whatever is in them; a run's key is in its secret/."""


def found_in(name: str, content: bytes) -> Iterator[str]:
    """Yield what looks like a secret, without the secret itself."""
    if re.search(NAMES, name):
        yield f"{name}: a file of this name is not to be tracked"
    if b"\0" in content:
        return
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        for kind, pattern in SECRETS.items():
            if re.search(pattern, line):
                yield f"{name}:{number}: {kind}"


def tracked(root: Path) -> Iterable[str]:
    """Return the names of the tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if (root / name).is_file()]


def scan(root: Path = ROOT) -> list[str]:
    """Return what looks like a secret in the tracked files."""
    return [line for name in tracked(root) for line in found_in(name, (root / name).read_bytes())]


def verdict(answer: str) -> tuple[str, bool]:
    """Return what pip-audit's JSON says, in a line, and whether it is good."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return "pip-audit: the index is not reachable, skipped", True
    asked = [p for p in packages if "skip_reason" not in p]
    bad = [f"{p['name']} {p['version']}: {v['id']}" for p in asked for v in p.get("vulns", [])]
    if bad:
        return "pip-audit: known vulnerabilities: " + "; ".join(bad), False
    if not asked:
        return "pip-audit: the index knows none of the packages or is not reachable, skipped", True
    left = len(packages) - len(asked)
    return f"pip-audit: {len(asked)} packages without known vulnerabilities, {left} skipped", True


def audit_packages(root: Path = ROOT) -> tuple[str, bool]:
    """Ask the index about the locked packages."""
    tool = shutil.which("pip-audit", path=f"{Path(sys.executable).parent}:{Path.home()}/.local/bin")
    if tool is None:
        return "pip-audit: not installed, skipped (pip install pip-audit)", True
    words = ["--requirement", "requirements.lock", "--no-deps", "--disable-pip", "--format", "json"]
    try:
        done = subprocess.run(
            [tool, *words, "--progress-spinner", "off", "--timeout", "10"],
            cwd=root, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "pip-audit: the index is not reachable, skipped", True
    return verdict(done.stdout)


def main() -> int:
    problems = scan()
    for problem in problems:
        print(f"secret scan: {problem}")
    if not problems:
        print("secret scan: no secrets in the tracked files")
    line, good = audit_packages()
    print(line)
    return int(bool(problems) or not good)


if __name__ == "__main__":
    sys.exit(main())
