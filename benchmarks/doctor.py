"""Run doctor on ten jobs with a planted fault and on twenty healthy ones.

    python -m benchmarks.doctor --resume               # what has no row yet (20 min, two cores)
    python -m benchmarks.doctor --only "one dead link" # some cases

Each case adds a row to doctor.csv in the folder --out. It passes if doctor finds the fault, names
its ranks, and finds nothing else; or finds nothing, if healthy. The exit status is 1 if a case does
not pass. benchmarks/report_doctor.py writes the table of docs/doctor.md. Needs root.
"""

import os
import sys

from benchmarks.arguments import table_folder, table_parser
from benchmarks.doctor_cases import FAULTS, HEALTHY, Case, examined
from benchmarks.net.rows import DOCTOR, Table, TableError, conditions
from benchmarks.net.shell import missing

CASES = {case.name: case for case in (*FAULTS, *HEALTHY)}


def main() -> None:
    # Here, because the report imports this module, and should not have to import torch.
    from recipes.errors import exit_on_user_error
    from recipes.result_files import make_folder

    parser = table_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, default=[*CASES])
    arguments = parser.parse_args()
    folder = arguments.out or table_folder(False, "doctor")
    if missing():
        sys.exit(f"error: {missing()}")
    with exit_on_user_error(TableError):
        make_folder(folder)
        table = Table(folder / "doctor.csv", DOCTOR)
    todo = [name for name in arguments.only if not (arguments.resume and table.has(case=name))]
    failed = [name for name in todo if not measure(CASES[name], table)]
    if failed:
        sys.exit("did not pass: " + ", ".join(failed))


def measure(case: Case, table: Table) -> bool:
    """Run one case, add its row, and return whether it passes."""
    outcome = examined(case)
    passed = outcome.names(case)
    named = ",".join(map(str, case.ranks))
    row = {
        "case": case.name,
        "kind": "fault" if case.code else "healthy",
        "ranks": case.world_size,
        "mbit": case.mbit,
        "expected": f"{case.code} {named}".strip(),
        "found": outcome.findings(),
        "status": outcome.found.get("status", ""),
        "doctor_s": f"{outcome.found.get('seconds', 0):.1f}",
        "job_s": f"{outcome.seconds:.1f}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "passed": passed,
    }
    table.add({**conditions(), **row})
    print(case.name, "passed" if passed else "DID NOT PASS", row, flush=True)
    if not passed:
        print(outcome.report, outcome.log[-4000:], file=sys.stderr, flush=True)
    return passed


if __name__ == "__main__":
    main()
