"""Command line of the campaign."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

from tests.campaign.trials import STEPS, Outcome, run_trial


def main() -> int:
    """Run trials; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--seed", default="0", help="of the campaign")
    parser.add_argument("--trials", type=int, default=20, help="how many")
    parser.add_argument("--trial", type=int, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument(
        "--every", type=int, default=1, help="only every so many-th, for several processes side by side"
    )
    parser.add_argument("--steps", type=int, default=0, help="go on until so many steps are done")
    parser.add_argument("--length", type=int, default=STEPS, help="steps of a trial")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, too; one line for each")
    parser.add_argument("--log", type=int, default=40, help="operations before a failure that are shown")
    options = parser.parse_args()
    if options.trial is not None:
        options.first, options.trials = options.trial, 1
    gc.collect()
    gc.freeze()  # what was imported needs no looking at
    gc.disable()  # a trial's own cycles go at its end
    started, failed, steps, operations, checks = time.perf_counter(), 0, 0, 0, 0
    kinds: dict[str, int] = {}
    trial = options.first
    while steps < options.steps if options.steps else trial < options.first + options.trials * options.every:
        outcome = run_trial(options.seed, trial, options.length, options.log)
        steps, operations, checks = steps + outcome.steps, operations + outcome.operations, checks + outcome.checks
        for kind, count in outcome.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + count
        if outcome.failure is not None:
            failed += 1
            print(f"trial {trial}: {outcome.failure}" if options.keep_going else shown(options.seed, trial, outcome))
            if not options.keep_going:
                break
        trial += options.every
    seconds = time.perf_counter() - started
    print(f"{steps} steps, {operations} file operations, {checks} checks in {seconds:.1f} s; {failed} trials failed")
    for kind, count in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"  {count:7d} {kind}", file=sys.stderr)
    return 1 if failed else 0


def shown(seed: str, trial: int, outcome: Outcome) -> str:
    """A failure, as somebody needs it who is to find the cause."""
    lines = [f"seed {seed}, trial {trial}: {outcome.failure}", *(f"  {line}" for line in outcome.log)]
    return "\n".join([*lines, f"again: python -m tests.campaign --seed {seed} --trial {trial}"])


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of names is a choice as well
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.campaign", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
