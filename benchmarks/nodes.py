"""Versions between two to nine nodes whose links are limited: full versions beside deltas, in modes memory and nccl.

    python benchmarks/nodes.py --json [--mbit 100] [--nodes 2] [--explorers 1] [--layers 28] [--changed 0.007]
                               [--versions 4] [--modes memory nccl] [--encodings full auto] [--transports auto]
                               [--pieces 512 [--kill 3]]
                               [--output benchmarks/results/nodes.json]

Needs Linux, root, `ip`, `tc` and `unshare`. Network namespaces of this machine are the nodes: a raylet in each, and
a token bucket of that rate in both directions (0: no limit). Two ranks of the trainer are on the first node, explorers
on each other one (`launch.py workload=bytes`: the shapes of qwen3-0.6b, random weights, of which each step changes that
share). For each mode and encoding one run; figures are medians over its versions but the first two. `publish_s` is from
the copy into the slot to the commit, `encode_s` the part of it for deltas, `load_s` from the commit until all explorers
serve it, digests included. `rate_s` is the time that a full version needs at the link's rate.

`--pieces` measures only what carries the versions, without Ray (`node_members.py`): versions of so many MiB, two parts.
With `--kill` that node is killed while the third version travels, and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "TRINITY_BENCHMARK_NAMESPACE"
HEAD = "10.99.0.1"
_STORE_BYTES = 3 << 29


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON (the only output format)")
    parser.add_argument("--mbit", type=int, default=100, help="rate of each link, Mbit/s each way (default 100)")
    parser.add_argument(
        "--nodes", type=int, choices=range(2, 10), default=2, help="the trainer's among them (default 2)"
    )
    parser.add_argument("--explorers", type=int, default=1, help="on each node but the first (default 1)")
    parser.add_argument("--pieces", type=int, metavar="MIB", help="measure the transport alone")
    parser.add_argument("--kill", type=int, choices=range(2, 10), metavar="NODE", help="with --pieces: one that dies")
    parser.add_argument("--layers", type=int, default=28, help="of the model (default 28, all)")
    parser.add_argument("--changed", type=float, default=0.007, help="share that a step changes (default 0.007)")
    parser.add_argument("--versions", type=int, default=4, help="after the first one (default 4)")
    parser.add_argument("--modes", nargs="+", choices=("memory", "nccl"), default=("memory", "nccl"))
    parser.add_argument("--encodings", nargs="+", choices=("full", "auto"), default=("full", "auto"))
    parser.add_argument("--transports", nargs="+", default=("auto",), help="of mode memory (default auto)")
    parser.add_argument("--codecs", nargs="+", default=("auto",), help="of deltas (default auto)")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    if options.kill is not None and (not options.pieces or options.kill > options.nodes):
        parser.error(f"--kill needs --pieces and a node up to --nodes ({options.nodes})")
    if INSIDE not in os.environ:  # all that is made goes with the namespace
        own = ["unshare", "-m", "-n", "--propagation", "private", sys.executable, __file__, *sys.argv[1:]]
        os.execvpe("unshare", own, {**os.environ, INSIDE: "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the raylets are ended
    limit_links(options.nodes, options.mbit)
    shared = "/dev/shm" if options.pieces else None  # a node that is killed leaves its slots
    with tempfile.TemporaryDirectory(prefix="nodes-", dir=shared) as folder:
        found = [pieces(Path(folder), options)] if options.pieces else runs(Path(folder), options)
    report = {
        "command": " ".join(["python", "benchmarks/nodes.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "mbit": options.mbit,
        "nodes": options.nodes,
        "explorers": options.explorers,
        "changed": options.changed,
        "runs": found,
    }
    text = json.dumps(report, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


def runs(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a run for each mode, transport and encoding."""
    found = []
    with cluster(folder, options.nodes, options.explorers):
        for mode, transport in itertools.product(options.modes, options.transports):
            ways = [("full", "auto"), *(("auto", one) for one in options.codecs)]
            for encoding, codec in (way for way in ways if way[0] in options.encodings):
                given = (
                    f"sync={mode}",
                    f"sync.encoding={encoding}",
                    f"sync.delta.codec={codec}",
                    f"sync.transport={transport}",
                )
                run = folder / f"{mode}-{transport}-{encoding}-{codec}"
                names = {"mode": mode, "transport": transport, "encoding": encoding, "codec": codec}
                found.append({**names, **measure(run, given, options)})
                print(json.dumps(found[-1]), file=sys.stderr)
    return found


def pieces(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the transport alone: medians over the versions but the first two."""
    member = str(Path(__file__).with_name("node_members.py"))
    sizes = [str(options.nodes - 1), "2", str(options.pieces << 20), str(options.versions + 2)]
    logs = {one: folder / f"node-{one}.log" for one in range(1, options.nodes + 1)}
    commands = {one: [sys.executable, member, "node", f"10.99.0.{one}", HEAD, str(folder)] for one in logs}
    commands[1] = [sys.executable, member, "owner", HEAD, *sizes, str(folder)]
    started = {}
    try:
        for one, command in commands.items():
            started[one] = in_node(one, command, logs[one])
        if (victim := options.kill) is not None:
            while "version 2\n" not in logs[1].read_text():
                time.sleep(0.01)
                assert started[1].poll() is None, logs[1].read_text()
            time.sleep((_rate_s(options.pieces << 20, options) or 0.1) / 2)
            started[victim].kill()
            started[victim].wait(60)
            started[victim] = in_node(victim, commands[victim], logs[victim])
        for one, process in started.items():
            if process.wait(3600):
                raise SystemExit(logs[one].read_text()[-5000:])
    finally:
        for process in started.values():
            process.kill()
    versions = json.loads(logs[1].read_text().splitlines()[-1])[2:]
    took = statistics.median(one["s"] for one in versions)
    cpu = [*(one["owner_cpu_s"] for one in versions), *(max(one["cpu_s"]) for one in versions)]
    found = {"bytes": options.pieces << 20, "s": took, "GB/s": (options.pieces << 20) / took / 1e9, "cpu_s": max(cpu)}
    found["took_it"] = [one["nodes"] for one in json.loads(logs[1].read_text().splitlines()[-1])]
    rate_s = _rate_s(options.pieces << 20, options)
    return {**found, "ratio": took / rate_s if rate_s else None}


def _rate_s(nbytes: int, options: argparse.Namespace) -> float | None:
    """The seconds that bytes need at the link's rate; None: it has no limit."""
    return nbytes * 8 / options.mbit / 1e6 if options.mbit else None


def limit_links(nodes: int, mbit: int) -> None:
    """Make the namespaces n1, n2 ... on a bridge."""
    shape = f"tbf rate {mbit}mbit burst 256kb limit 4mb"
    lines = [
        "ip link set lo up",
        "mkdir -p /run/netns",
        "mount -t tmpfs none /run/netns",
        "ip link add br0 type bridge",
    ]
    lines += ["ip link set br0 up", "ip addr add 10.99.0.254/24 dev br0"]
    for one in range(1, nodes + 1):
        lines += [
            f"ip netns add n{one}",
            f"ip link add h{one} type veth peer name eth0 netns n{one}",
            f"ip link set h{one} master br0 up",
            f"ip -n n{one} link set lo up",
            f"ip -n n{one} addr add 10.99.0.{one}/24 dev eth0",
            f"ip -n n{one} link set eth0 up",
        ]
        if mbit:
            lines += [
                f"tc qdisc add dev h{one} root {shape}",
                f"ip netns exec n{one} tc qdisc add dev eth0 root {shape}",
            ]
    for line in lines:
        subprocess.run(line.split(), check=True)


@contextmanager
def cluster(folder: Path, nodes: int, explorers: int) -> Iterator[None]:
    """A raylet in each namespace."""
    common = ["--block", "--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}"]
    head = ["--head", f"--node-ip-address={HEAD}", "--port=6379", "--num-cpus=2", "--include-dashboard=false"]
    started = []
    try:
        for one in range(1, nodes + 1):
            other = [f"--address={HEAD}:6379", f"--node-ip-address=10.99.0.{one}", f"--num-cpus={explorers}"]
            own = other if one > 1 else [*head, f"--temp-dir={folder}/ray"]
            command = [str(Path(sys.executable).with_name("ray")), "start", *common, *own]
            started.append(in_node(one, command, folder / f"raylet-{one}.log"))
            time.sleep(10)
            assert started[-1].poll() is None, (folder / f"raylet-{one}.log").read_text()
        yield
    finally:
        for name in ("-TERM", "-KILL"):
            for one in range(1, nodes + 1):
                pids = subprocess.run(["ip", "netns", "pids", f"n{one}"], capture_output=True, text=True).stdout.split()
                subprocess.run(["kill", name, *pids], stderr=subprocess.DEVNULL)
            time.sleep(3)


def in_node(one: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a namespace."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RAY_AUTH_MODE": "disabled"}
    with log.open("wb") as output:
        given = ["ip", "netns", "exec", f"n{one}", *command]
        return subprocess.Popen(given, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)


def measure(run: Path, given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    command = [sys.executable, "launch.py", "live=off", "cluster=existing", f"cluster.address={HEAD}:6379"]
    command += ["workload=bytes", "model.shapes=qwen3-0.6b", f"model.layers={options.layers}", "backend.ranks=2"]
    command += [
        f"explorer.replicas={options.explorers * (options.nodes - 1)}",
        f"trainer.steps={options.versions}",
        "checkpoint.interval=0",
        *given,
    ]
    command += [f"workload.changed={options.changed}", "sync.timeout_s=900", f"hydra.run.dir={run}"]
    log = run.with_suffix(".log")
    if in_node(1, command, log).wait(3600):
        raise SystemExit(log.read_text()[-5000:])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    sent = [event for event in events if event["event"] == "publish" and event["version"] > 1]
    loads = [event for event in events if event["event"] == "load" and event["version"] > 1]
    explorers = options.explorers * (options.nodes - 1)
    assert len(sent) == len(loads) / explorers == options.versions - 1, f"{len(sent)} versions, {len(loads)} loads"
    assert not [event for event in events if event["event"] == "fault"], "a version was sent again"

    # of each version the last explorer's
    last = [
        max((one for one in loads if one["version"] == v), key=lambda one: one["total_s"])
        for v in {e["version"] for e in sent}
    ]

    def median(found: Sequence[dict[str, Any]], name: str) -> float | None:
        values = [event[name] for event in found if event.get(name) is not None]
        return statistics.median(values) if values else None

    return {
        "bytes_full": sent[0]["bytes_full"],
        "bytes": median(last, "bytes"),
        "rate_s": _rate_s(sent[0]["bytes_full"], options),
        "publish_s": median(sent, "total_s"),
        "encode_s": median(sent, "encode_s"),
        "load_s": median(last, "total_s"),
        "apply_s": median(last, "apply_s"),
    }


if __name__ == "__main__":
    main()
