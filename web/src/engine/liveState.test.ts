import { describe, expect, it } from "vitest";
import type { Change, PageRun, SequenceRow, Snapshot } from "../api/live";
import { applyChange, countPages, type Live, sumRecent, takeSnapshot } from "./liveState";

const COUNTERS = {
  steps: 0,
  failed_steps: 0,
  prefill_tokens: 0,
  decode_tokens: 0,
  recomputed_tokens: 0,
  preemptions: 0,
  late_answers: 0,
  refused_requests: 0,
  drafted_tokens: 0,
  accepted_tokens: 0,
  memory_hit_tokens: 0,
  disk_hit_tokens: 0,
  peer_hit_tokens: 0,
  missed_tokens: 0,
  evicted_pages: 0,
  dropped_pages: 0,
  copied_bytes: 0,
};

function snapshot(pages: number, runs: PageRun[]): Snapshot {
  return {
    time: 100,
    models: ["demo:latest"],
    model: null,
    groups: [
      {
        group: 0,
        name: "attention",
        layers: 6,
        pages,
        page_size: 16,
        page_bytes: 4096,
        holds: "pages",
        short_tokens: 32,
        runs,
      },
    ],
    sequences: [],
    queue: { waiting: 0, running: 0 },
    counters: COUNTERS,
    store: null,
    kernels: [],
    limits: null,
    limits_hint: "measure it",
  };
}

const change = (part: Partial<Change>): Change => ({ time: 100.1, seconds: 0.1, ...part });

function row(part: Partial<SequenceRow>): SequenceRow {
  return {
    request: 1,
    index: 0,
    client: null,
    priority: 0,
    phase: "decode",
    prompt_tokens: 4,
    cached_tokens: 0,
    tokens: 5,
    written_tokens: 4,
    end_tokens: 9,
    tables: [],
    ...part,
  };
}

describe("pages", () => {
  it("have the codes that a plain array would, over random changes", () => {
    const pages = 97;
    const model = new Uint8Array(pages);
    let live: Live = takeSnapshot(snapshot(pages, [[0, pages, 0]]), null);
    let state = 1;
    const draw = (below: number) => {
      state = (state * 48271) % 2147483647;
      return state % below;
    };
    for (let turn = 0; turn < 2000; turn++) {
      const first = draw(pages);
      const count = 1 + draw(pages - first);
      const code = draw(12);
      model.fill(code, first, first + count);
      live = applyChange(
        live,
        change({ groups: [{ group: 0, runs: [[first, count, code]], evicted: [], copied: [], short_tokens: 0 }] }),
        0,
      );
    }
    expect(live.groups[0]?.codes).toEqual(model);
    const counts = countPages(model);
    expect(counts.free + counts.private + counts.shared + counts.cached).toBe(pages);
  });

  it("flash when they are evicted or copied to", () => {
    const live = applyChange(
      takeSnapshot(snapshot(9, [[0, 9, 0]]), null),
      change({ groups: [{ group: 0, runs: [], evicted: [3, 3], copied: [[1, 5]], short_tokens: 16 }] }),
      7,
    );
    expect([...(live.groups[0]?.flashes ?? [])]).toEqual([
      [3, { kind: "evicted", at: 7 }],
      [5, { kind: "copied", at: 7 }],
    ]);
    expect(live.groups[0]?.state.short_tokens).toBe(48);
  });
});

describe("sequences", () => {
  it("keep the pages before a part's start, and go when they are gone", () => {
    let live = takeSnapshot(snapshot(9, [[0, 9, 0]]), null);
    live = applyChange(live, change({ sequences: [row({ tables: [{ group: 0, start: 0, pages: [4, 2] }] })] }), 0);
    live = applyChange(live, change({ sequences: [row({ tables: [{ group: 0, start: 1, pages: [2, 7] }] })] }), 0);
    expect(live.sequences.get("1.0")?.tables).toEqual([{ group: 0, start: 0, pages: [4, 2, 7] }]);
    live = applyChange(live, change({ sequences: [row({ tokens: 6 })] }), 0);
    expect(live.sequences.get("1.0")).toMatchObject({ tokens: 6, tables: [{ group: 0, pages: [4, 2, 7] }] });
    live = applyChange(live, change({ gone: [[1, 0]] }), 0);
    expect(live.sequences.size).toBe(0);
  });
});

it("adds counters and calls, and replaces the rest", () => {
  let live = takeSnapshot(snapshot(1, [[0, 1, 0]]), null);
  const kernels = [{ operator: "linear", implementation: "cpu", variant: "rows", count: 3 }];
  for (let turn = 0; turn < 2; turn++) live = applyChange(live, change({ counters: { steps: 2 }, kernels }), 0);
  const limits = { read_bytes_per_s: 1, int8_macs_per_s: 2, measured_at: 3 };
  live = applyChange(live, change({ limits, queue: { waiting: 3, running: 1 } }), 0);
  expect(live.counters.steps).toBe(4);
  expect([...live.kernels.values()]).toEqual([{ ...kernels[0], count: 6, recent: 3 }]);
  expect(live.limits).toEqual(limits);
  expect(live.limitsHint).toBeNull();
  expect(live.history.at(-1)).toMatchObject({ waiting: 3, running: 1 });
});

it("sums what happened lately, and shows that nothing happened in a gap", () => {
  const step = { steps: 2, seconds: 0.5, prefill_tokens: 10, decode_tokens: 4, read_bytes: 100, macs: 50 };
  let live = takeSnapshot(snapshot(1, [[0, 1, 0]]), null);
  live = applyChange(live, { time: 100, seconds: 0.1, steps: [step, step] }, 0);
  live = applyChange(live, { time: 130, seconds: 30, steps: [step] }, 0);
  expect(live.history.map((moment) => moment.steps)).toEqual([4, 0, 0, 2]);
  expect(sumRecent(live.history, 0.1)).toMatchObject({ steps: 2, stepSeconds: 0.5, readBytes: 100 });
  expect(sumRecent(live.history, 60)).toMatchObject({ steps: 6, decodeTokens: 12, macs: 150 });
  expect(sumRecent([], 1)).toBeNull();
});
