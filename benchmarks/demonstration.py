"""The demonstration of ``kernelcast demo`` on this machine, with nothing remembered of earlier runs."""

from __future__ import annotations

from typing import Any


def main(quick: bool) -> dict[str, Any]:
    """Collect, train and select. Quick: softmax alone."""
    from kernelcast.cli.demo import shape_text
    from kernelcast.demo import Listener, run
    from kernelcast.demo_problems import OPERATIONS
    from kernelcast.kernels.detect import detect

    operations = ("softmax",) if quick else OPERATIONS
    quiet = Listener(stage=lambda _: None, collecting=lambda _: None, training=lambda *_: None)
    result = run(detect(), operations=operations, tracking=False, listener=quiet)
    tables = [
        {
            "title": "Held-out problems against measuring every candidate",
            "columns": [
                "operation",
                "held-out problems",
                "model @1",
                "model @3",
                "model @5",
                "selections",
                "promoted",
            ],
            "rows": [
                [
                    found.operation,
                    found.problems,
                    *(found.efficiency[k]["geomean"] for k in ("1", "3", "5")),
                    found.achieved,
                    "yes" if found.trained is not None and found.trained.promoted else "no",
                ]
                for found in result.operations
            ],
        }
    ]
    for found in result.operations:
        rows = [
            [
                shape_text(row.selection.problem),
                str(row.selection.candidate),
                row.selection.predicted_us,
                row.selection.measured_us,
                row.selection.default_us,
                row.selection.speedup,
                f"{row.selection.measured} of {row.selection.candidates}",
            ]
            for row in found.rows
        ]
        columns = [
            "problem",
            "selection",
            "predicted us",
            "measured us",
            "default us",
            "speed-up",
            "measured",
        ]
        tables.append({"title": found.operation, "columns": columns, "rows": rows})
    return {
        "title": f"The demonstration on {result.device.name}",
        "tables": tables,
        "notes": [
            f"{result.seconds / 60:.1f} minutes in all, {result.device.cores} cores, no MLflow run.",
            "Efficiencies are geometric means: of the model's ranking with the default among the k, and of the selections "
            "that verification made with k = 3. A model that was not promoted leaves the ranking to the roofline.",
            "The default is torch's own call; measured and default are of one interleaved race.",
        ],
    }
