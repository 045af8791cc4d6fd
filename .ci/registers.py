"""The registers of our CUDA kernels, and whether any spill.

registers.py keep OBJECT COMMAND...: compiles, and keeps what ptxas says in OBJECT.ptxas.
registers.py report FOLDER: writes FOLDER/registers.txt; fails where a kernel spills.
"""

import pathlib
import re
import shutil
import subprocess
import sys

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def keep(target: str, command: list[str]) -> int:
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    said = "ptxas info" in result.stderr
    if said and result.returncode == 0:
        pathlib.Path(f"{target}.ptxas").write_text(result.stderr)
    else:
        sys.stderr.write(result.stderr)
    return result.returncode


def report(folder: pathlib.Path) -> int:
    used: dict[str, dict[str, int]] = {}
    spilling: dict[tuple[str, str], str] = {}
    for log in sorted(folder.rglob("*.ptxas")):
        if not log.with_suffix("").exists():
            continue
        entries = [e for e in _ENTRY.findall(log.read_text()) if "torchrec_tt" in e[0]]
        names = _names([e[0] for e in entries])
        for name, (_, architecture, stores, loads, registers) in zip(names, entries, strict=True):
            used.setdefault(name, {})[architecture] = int(registers)
            if int(stores) + int(loads):
                spilling[name, architecture] = f"{stores} + {loads} bytes"
    if not used:
        print(f"cuda-check: no kernel was compiled in {folder}")
        return 1
    architectures = sorted({a for registers in used.values() for a in registers}, key=int)
    lines = [f"{'registers of a thread on sm_':<72}" + "".join(f"{a:>5}" for a in architectures)]
    for name, registers in sorted(used.items()):
        lines.append(f"{name:<72}" + "".join(f"{registers.get(a, ''):>5}" for a in architectures))
    (folder / "registers.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"cuda-check: {len(used)} kernels for {len(architectures)} architectures")
    for (name, architecture), spilled in spilling.items():
        print(f"cuda-check: {name} spills {spilled} on sm_{architecture}")
    return 1 if spilling else 0


def _names(mangled: list[str]) -> list[str]:
    """Returns kernels' names with their template arguments, without namespaces and parameters."""
    if shutil.which("c++filt") is None or not mangled:
        return mangled
    result = subprocess.run(
        ["c++filt", "-p"], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    return [
        re.sub(r"^void |\(anonymous namespace\)::|torchrec_tt::(cuda::)?", "", line)
        for line in result.stdout.splitlines()
    ]


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        sys.exit(keep(sys.argv[2], sys.argv[3:]))
    sys.exit(report(pathlib.Path(sys.argv[2])))
