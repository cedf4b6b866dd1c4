"""The charts of the dashboard as Vega-Lite specifications. Data and colours are filled in by the page.

Every chart has one question in its `description`, which is what a screen reader hears; the page puts the
same numbers into a table beside it.
"""

from __future__ import annotations

from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
SIZE = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
BY_ORDER = {"field": "order", "op": "min"}
US = {"type": "quantitative", "title": "microseconds, median", "scale": {"type": "log"}}


def _tooltip(*fields: str) -> list[dict[str, Any]]:
    numbers = {"median_us", "floor_us", "ratio", "factor", "our_us", "peer_us", "gbps", "low_us", "high_us"}
    return [
        {"field": f, "type": "quantitative", "format": ".4g"} if f in numbers else {"field": f}
        for f in fields
    ]


def history() -> dict[str, Any]:
    """One line a figure over the runs, with its quartiles; the floor dashed below it."""
    x = {
        "field": "label",
        "type": "ordinal",
        "title": "run (date, commit)",
        "sort": {"field": "run"},
        "axis": {"labelAngle": -30},
    }
    colour = {
        "field": "series",
        "type": "nominal",
        "title": None,
        "legend": {"orient": "bottom", "columns": 1},
    }
    return {
        "$schema": SCHEMA,
        "description": "How has each figure moved from run to run, and how far above its floor does it stand?",
        **SIZE,
        "height": 300,
        "data": {"name": "rows"},
        "layer": [
            {
                "mark": {"type": "line", "point": {"size": 60}},
                "encoding": {
                    "x": x,
                    "y": {"field": "median_us", **US},
                    "color": colour,
                    "tooltip": _tooltip(
                        "series", "label", "median_us", "floor_us", "ratio", "engine", "check"
                    ),
                },
            },
            {
                "mark": {"type": "rule"},
                "encoding": {
                    "x": x,
                    "y": {"field": "low_us", **US},
                    "y2": {"field": "high_us"},
                    "color": colour,
                },
            },
            {
                "mark": {"type": "line", "strokeDash": [4, 4], "opacity": 0.6},
                "encoding": {"x": x, "y": {"field": "floor_us", **US}, "color": colour},
            },
        ],
    }


def ratios() -> dict[str, Any]:
    """Measured time over the floor by shape, ours and peers side by side."""
    return {
        "$schema": SCHEMA,
        "description": "How many times its own floor does each engine take, by shape? 1 is the floor.",
        **SIZE,
        "height": {"step": 14},
        "data": {"name": "rows"},
        "layer": [
            {
                "mark": "bar",
                "encoding": {
                    "y": {
                        "field": "shape",
                        "type": "nominal",
                        "title": None,
                        "axis": {"labelLimit": 170},
                        "sort": BY_ORDER,
                    },
                    "yOffset": {"field": "engine"},
                    "x": {
                        "field": "ratio",
                        "type": "quantitative",
                        "title": "times the floor of its own format (logarithmic)",
                        "scale": {"type": "log"},
                    },
                    "x2": {"datum": 1},
                    "color": {
                        "field": "engine",
                        "type": "nominal",
                        "title": None,
                        "legend": {"orient": "bottom"},
                    },
                    "tooltip": _tooltip(
                        "shape", "engine", "mode", "format", "ratio", "median_us", "floor_us", "gbps"
                    ),
                },
            },
            {
                "data": {"values": [{"one": 1}]},
                "mark": {"type": "rule", "strokeDash": [3, 3]},
                "encoding": {"x": {"field": "one", "type": "quantitative"}},
            },
        ],
    }


def peers() -> dict[str, Any]:
    """How much faster than each peer, by shape."""
    return {
        "$schema": SCHEMA,
        "description": "How many times faster than each peer of the same run? Left of 1 the peer is faster.",
        **SIZE,
        "height": {"step": 18},
        "data": {"name": "rows"},
        "layer": [
            {
                "mark": {"type": "bar"},
                "encoding": {
                    "y": {
                        "field": "shape",
                        "type": "nominal",
                        "title": None,
                        "axis": {"labelLimit": 170},
                        "sort": BY_ORDER,
                    },
                    "yOffset": {"field": "peer"},
                    "x": {
                        "field": "factor",
                        "type": "quantitative",
                        "title": "times faster than the peer (logarithmic)",
                        "scale": {"type": "log"},
                    },
                    "x2": {"datum": 1},
                    "color": {
                        "field": "peer",
                        "type": "nominal",
                        "title": None,
                        "legend": {"orient": "bottom"},
                    },
                    "opacity": {"condition": {"test": "datum.comparable", "value": 1}, "value": 0.45},
                    "tooltip": _tooltip("shape", "peer", "factor", "our_us", "peer_us", "note"),
                },
            },
            {
                "data": {"values": [{"one": 1}]},
                "mark": {"type": "rule", "strokeDash": [3, 3]},
                "encoding": {"x": {"field": "one", "type": "quantitative"}},
            },
        ],
    }


def heat() -> dict[str, Any]:
    """Component by shape, coloured by the ratio to the floor, the number written in."""
    shared = {
        "x": {
            "field": "size",
            "type": "ordinal",
            "title": "batch x new tokens @ context",
            "sort": BY_ORDER,
            "axis": {"labelAngle": 0, "labelOverlap": False},
        },
        "y": {"field": "component", "type": "nominal", "title": None, "axis": {"labelLimit": 170}},
    }
    return {
        "$schema": SCHEMA,
        "description": "Which shapes are far from their floor? Ratio of the measured time to the floor.",
        **SIZE,
        "height": {"step": 34},
        "data": {"name": "rows"},
        "encoding": shared,
        "layer": [
            {
                "mark": {"type": "rect", "cornerRadius": 3},
                "encoding": {
                    "color": {
                        "field": "ratio",
                        "type": "quantitative",
                        "title": "x floor",
                        "scale": {
                            "type": "log",
                            "scheme": "yelloworangered",
                            "domain": [1, 8],
                            "clamp": True,
                        },
                        "legend": {"values": [1, 1.5, 2, 4, 8]},
                    },
                    "tooltip": _tooltip("component", "size", "engine", "ratio", "median_us", "floor_us"),
                },
            },
            {
                "mark": {"type": "text", "fontSize": 12},
                "encoding": {
                    "text": {"field": "ratio", "type": "quantitative", "format": ".3g"},
                    "color": {
                        "condition": {"test": "datum.ratio > 3.5", "value": "#ffffff"},
                        "value": "#1b1b1b",
                    },
                },
            },
        ],
    }


def state() -> dict[str, Any]:
    """Bytes of one sequence against its capacity, packed and as the release stores it."""
    return {
        "$schema": SCHEMA,
        "description": "How many bytes does one sequence hold, by capacity, packed and in the release's own form?",
        **SIZE,
        "height": 260,
        "data": {"name": "rows"},
        "mark": {"type": "line", "point": {"size": 50}},
        "encoding": {
            "x": {
                "field": "capacity",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2},
                "axis": {
                    "values": [1024 * 4**i for i in range(6)],
                    "labelExpr": "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : datum.value / 1024 + 'k'",
                },
                "title": "capacity in tokens",
            },
            "y": {
                "aggregate": "sum",
                "field": "bytes",
                "type": "quantitative",
                "scale": {"type": "log"},
                "axis": {"format": "~s"},
                "title": "bytes a sequence",
            },
            "color": {"field": "form", "type": "nominal", "title": None, "legend": {"orient": "bottom"}},
            "tooltip": [
                {"field": "form"},
                {"field": "capacity", "type": "quantitative", "format": ","},
                {"aggregate": "sum", "field": "bytes", "type": "quantitative", "format": ","},
            ],
        },
    }


CHARTS = {"history": history, "ratios": ratios, "peers": peers, "heat": heat, "state": state}
