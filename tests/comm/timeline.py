"""A trace file, taken as Perfetto's importer takes it: what that one drops, moves elsewhere or guesses at is an error here.

The rules: Perfetto's docs/getting-started/other-formats.md, src/trace_processor/importers/json and common/slice_tracker.cc
"""
import json
import math

import pytest

CATEGORIES = {"op", "backward", "seam", "collective", "transfer"}


def read(text):
    """(rows, otherData): the spans of each row by its name, in order; each knows its `parent`, None for an outermost one."""
    def no_number(word):
        pytest.fail(f"{word} is not JSON")
    trace = json.loads(text, parse_constant=no_number)
    assert trace.keys() == {"otherData", "traceEvents"}
    names, places, rows, opened = {}, {}, {}, {}
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is type(event["tid"]) is int and event["pid"] and event["tid"], "0 stands for another thread"
        assert event["name"] and type(event["name"]) is str and type(event["args"]) is dict
        if event["ph"] == "M":
            kind, tid = event["name"], event["tid"]
            assert kind in ("process_name", "thread_name", "thread_sort_index"), kind
            if kind != "process_name":
                table, key = (names, "name") if kind == "thread_name" else (places, "sort_index")
                assert tid not in table, "two names of one row"
                table[tid] = event["args"][key]
            continue
        assert event["ph"] == "X" and event["cat"] in CATEGORIES
        assert all(type(value) in (str, int, float) for value in event["args"].values())
        start, dur = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        stop, row = start + dur, rows.setdefault(event["tid"], [])
        assert not row or start >= row[-1]["start"], "a row is not in order: of two that begin together the inner one was first"
        above = opened.setdefault(event["tid"], [])
        while above and above[-1]["stop"] <= start:
            above.pop()
        assert not above or stop <= above[-1]["stop"], f"{event['name']} and {above[-1]['name']} overlap in part"
        span = {**event, "start": start, "stop": stop, "parent": above[-1]["name"] if above else None}
        row.append(span)
        above.append(span)
    assert rows.keys() <= names.keys() == places.keys() and len(set(places.values())) == len(set(names.values())) == len(names)
    assert {event["pid"] for event in trace["traceEvents"]} == {1}
    return {names[tid]: rows.get(tid, []) for tid in sorted(names, key=places.__getitem__)}, trace["otherData"]


def nanoseconds(us):
    """Whole ones, as the importer rounds; a timestamp before 0 is dropped."""
    assert type(us) in (int, float) and math.isfinite(us)
    assert us >= 0, f"{us} is before 0"
    assert abs(1000 * us - round(1000 * us)) < 1e-3, f"{us} is rounded by the importer"
    return round(1000 * us)


def line_up(rows, size, slack=0.0):
    """Nobody leaves a collective before all have come: its spans have a moment in common."""
    calls = [[s for s in rows[f"rank {r}"] if s["cat"] == "collective" and s["name"] != "wait"] for r in range(size)]
    assert len({len(c) for c in calls}) == 1 and calls[0]
    for spans in zip(*calls):
        assert len({s["name"] for s in spans}) == 1
        assert max(s["ts"] for s in spans) <= min(s["ts"] + s["dur"] for s in spans) + slack
