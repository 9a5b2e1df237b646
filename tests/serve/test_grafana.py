"""The dashboard in the docs asks for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from tests.serve.fake import Fake  # noqa: E402
from weft.serve.metrics import Metrics  # noqa: E402

FILE = Path(__file__).parents[2] / "docs" / "serve" / "grafana.json"


def test_every_panel_asks_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    engine = Fake(tmp_path)
    try:
        text = Metrics(engine).text().decode()
    finally:
        engine.store.close()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    names = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()}
    panels = json.loads(FILE.read_text())["panels"]
    assert len(panels) == 6
    for panel in panels:
        asked = [name for target in panel["targets"] for name in re.findall(r"weft_\w+", target["expr"])]
        assert asked
        assert [name for name in asked if name not in names] == []
