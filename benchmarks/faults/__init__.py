"""Faults: what writes is killed, starved of disk, or handed broken and hostile files; what is lost is counted.

    nice -n 5 python -m benchmarks.faults --faults 500 --out bench-out/faults.json

`bench.py` has the world and its undisturbed results, `accidents.py` what happens, `attacks.py` what strangers send.
"""
