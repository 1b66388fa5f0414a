"""`make fuzz`: a million inputs over all targets; ends with an error at the first that is not dealt with."""

import argparse

from tests.fuzz import runner, targets

parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
parser.add_argument("--inputs", type=int, default=1_000_000)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--only", default="", help="run targets whose name contains this")
options = parser.parse_args()

total = seconds = 0.0
with targets.opened() as opened:
    for target in opened:
        if options.only not in target.name:
            continue
        done = runner.run(target, max(1, round(options.inputs * target.share)), options.seed)
        total, seconds = total + done.inputs, seconds + done.seconds
        print(
            f"{target.name:28} {done.inputs:9,} inputs {done.inputs / done.seconds:9,.0f}/s"
            f"  taken {done.taken / done.inputs:4.0%}  slowest {done.slowest * 1000:6.1f} ms",
            flush=True,
        )
print(f"{'total':28} {total:9,.0f} inputs {total / seconds:9,.0f}/s  in {seconds:.0f} s; no fault")
