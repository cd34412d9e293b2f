import type {
  Change,
  Counters,
  Dispatch,
  GroupState,
  LogEntry,
  MachineLimits,
  Queue,
  SequenceRow,
  Snapshot,
  StoreState,
  WatchedModel,
} from "../api/live";

/** Pages of one group; `codes` has holder + 4 × store of each page and is changed in place. */
export interface GroupPages {
  state: GroupState;
  codes: Uint8Array;
  /** Pages that were evicted or copied lately, and when (milliseconds of `performance.now`). */
  flashes: Map<number, { kind: "evicted" | "copied"; at: number }>;
}

/** What happened in the time before `time` (seconds since 1970). Rates are per second of that time. */
export interface Moment {
  time: number;
  seconds: number;
  steps: number;
  stepSeconds: number;
  prefillTokens: number;
  decodeTokens: number;
  readBytes: number;
  macs: number;
  waiting: number;
  running: number;
}

export interface KernelRow extends Dispatch {
  /** Calls in the last event in which it ran. */
  recent: number;
}

/** All that the view draws. A new object for every event; its large parts are shared with the one before. */
export interface Live {
  models: readonly string[];
  model: WatchedModel | null;
  groups: readonly GroupPages[];
  sequences: ReadonlyMap<string, SequenceRow>;
  queue: Queue;
  counters: Counters;
  store: StoreState | null;
  kernels: ReadonlyMap<string, KernelRow>;
  limits: MachineLimits | null;
  limitsHint: string | null;
  history: readonly Moment[];
  log: readonly LogEntry[];
  logLeftOut: number;
}

export const MOMENTS = 600;
export const LOG_ENTRIES = 500;
const IDLE_S = 0.35; // without an event for so long nothing has happened

export const FREE = 0;
export const PRIVATE = 1;
export const SHARED = 2;
export const CACHED = 3;
export const WAITING = 1;
export const ON_DISK = 2;

export function holderOf(code: number): number {
  return code & 3;
}

export function storeOf(code: number): number {
  return code >> 2;
}

/** The state that a snapshot tells; history and log of the same model go on. */
export function takeSnapshot(snapshot: Snapshot, before: Live | null): Live {
  const goesOn = before !== null && before.model?.name === snapshot.model?.name;
  return {
    models: snapshot.models,
    model: snapshot.model,
    groups: snapshot.groups.map((state) => {
      const codes = new Uint8Array(state.pages);
      for (const [first, count, code] of state.runs) codes.fill(code, first, first + count);
      return { state: { ...state }, codes, flashes: new Map() };
    }),
    sequences: new Map(snapshot.sequences.map((row) => [keyOf(row.request, row.index), row])),
    queue: snapshot.queue,
    counters: snapshot.counters,
    store: snapshot.store,
    kernels: new Map(snapshot.kernels.map((kernel) => [kernelKey(kernel), { ...kernel, recent: 0 }])),
    limits: snapshot.limits,
    limitsHint: snapshot.limits_hint,
    history: goesOn ? before.history : [],
    log: goesOn ? before.log : [],
    logLeftOut: goesOn ? before.logLeftOut : 0,
  };
}

/** The state after a change; docs/page-live.md says how each section is applied. `now` is of `performance.now`. */
export function applyChange(live: Live, change: Change, now: number): Live {
  for (const part of change.groups ?? []) {
    const group = live.groups.find((one) => one.state.group === part.group);
    if (!group) continue;
    for (const [first, count, code] of part.runs) group.codes.fill(code, first, first + count);
    group.state.short_tokens += part.short_tokens;
    for (const page of part.evicted) group.flashes.set(page, { kind: "evicted", at: now });
    for (const [, target] of part.copied) group.flashes.set(target, { kind: "copied", at: now });
  }
  const queue = change.queue ?? live.queue;
  return {
    ...live,
    models: change.models ?? live.models,
    groups: change.groups ? [...live.groups] : live.groups,
    sequences: changeSequences(live.sequences, change),
    queue,
    counters: change.counters ? addCounters(live.counters, change.counters) : live.counters,
    store: change.store ?? live.store,
    kernels: change.kernels ? addKernels(live.kernels, change.kernels) : live.kernels,
    limits: change.limits ?? live.limits,
    limitsHint: change.limits ? null : live.limitsHint,
    history: addMoment(live.history, change, queue),
    log: change.log ? [...change.log.toReversed(), ...live.log].slice(0, LOG_ENTRIES) : live.log,
    logLeftOut: live.logLeftOut + (change.log_left_out ?? 0),
  };
}

function changeSequences(before: ReadonlyMap<string, SequenceRow>, change: Change): ReadonlyMap<string, SequenceRow> {
  if (!change.sequences && !change.gone) return before;
  const rows = new Map(before);
  for (const [request, index] of change.gone ?? []) rows.delete(keyOf(request, index));
  for (const row of change.sequences ?? []) {
    const key = keyOf(row.request, row.index);
    const known = rows.get(key)?.tables ?? [];
    const tables = known.map((table) => {
      const part = row.tables.find((one) => one.group === table.group);
      return part ? { ...part, start: 0, pages: [...table.pages.slice(0, part.start), ...part.pages] } : table;
    });
    const fresh = row.tables.filter((part) => !known.some((table) => table.group === part.group));
    rows.set(key, { ...row, tables: [...tables, ...fresh] });
  }
  return rows;
}

function addCounters(before: Counters, change: Partial<Counters>): Counters {
  const sum = { ...before };
  for (const name of Object.keys(change) as (keyof Counters)[]) sum[name] += change[name] ?? 0;
  return sum;
}

function addKernels(before: ReadonlyMap<string, KernelRow>, ran: readonly Dispatch[]): ReadonlyMap<string, KernelRow> {
  const kernels = new Map(before);
  for (const kernel of ran) {
    const count = (kernels.get(kernelKey(kernel))?.count ?? 0) + kernel.count;
    kernels.set(kernelKey(kernel), { ...kernel, count, recent: kernel.count });
  }
  return kernels;
}

function addMoment(history: readonly Moment[], change: Change, queue: Queue): readonly Moment[] {
  const steps = change.steps ?? [];
  const sum = (of: (step: (typeof steps)[number]) => number) => steps.reduce((total, step) => total + of(step), 0);
  const moment: Moment = {
    time: change.time,
    seconds: change.seconds,
    steps: sum((step) => step.steps),
    stepSeconds: sum((step) => step.seconds),
    prefillTokens: sum((step) => step.prefill_tokens),
    decodeTokens: sum((step) => step.decode_tokens),
    readBytes: sum((step) => step.read_bytes),
    macs: sum((step) => step.macs),
    waiting: queue.waiting,
    running: queue.running,
  };
  const last = history.at(-1);
  const gap =
    last && change.time - last.time > IDLE_S ? [idle(last, last.time + 0.1), idle(last, change.time - 0.1)] : [];
  return [...history, ...gap, moment].slice(-MOMENTS);
}

function idle(last: Moment, time: number): Moment {
  return { ...last, time, steps: 0, stepSeconds: 0, prefillTokens: 0, decodeTokens: 0, readBytes: 0, macs: 0 };
}

/** Sums over the last `seconds` in which steps ran; null if none did. */
export function sumRecent(history: readonly Moment[], seconds: number): Moment | null {
  const chosen: Moment[] = [];
  let stepSeconds = 0;
  for (const moment of history.toReversed()) {
    if (moment.steps === 0) continue;
    if (stepSeconds >= seconds) break;
    chosen.push(moment);
    stepSeconds += moment.stepSeconds;
  }
  return chosen.length > 0 ? chosen.reduce(addMoments) : null;
}

function addMoments(newer: Moment, older: Moment): Moment {
  return {
    ...newer,
    seconds: newer.seconds + older.seconds,
    steps: newer.steps + older.steps,
    stepSeconds: newer.stepSeconds + older.stepSeconds,
    prefillTokens: newer.prefillTokens + older.prefillTokens,
    decodeTokens: newer.decodeTokens + older.decodeTokens,
    readBytes: newer.readBytes + older.readBytes,
    macs: newer.macs + older.macs,
  };
}

/** How many pages of a group have each kind. */
export function countPages(codes: Uint8Array): {
  free: number;
  private: number;
  shared: number;
  cached: number;
  disk: number;
  waiting: number;
} {
  const holders = [0, 0, 0, 0];
  const stores = [0, 0, 0];
  for (const code of codes) {
    holders[holderOf(code)] = (holders[holderOf(code)] ?? 0) + 1;
    stores[storeOf(code)] = (stores[storeOf(code)] ?? 0) + 1;
  }
  const [free = 0, own = 0, shared = 0, cached = 0] = holders;
  return { free, private: own, shared, cached, disk: stores[ON_DISK] ?? 0, waiting: stores[WAITING] ?? 0 };
}

export function keyOf(request: number, index: number): string {
  return `${request}.${index}`;
}

function kernelKey(kernel: Dispatch): string {
  return `${kernel.operator}\n${kernel.implementation}\n${kernel.variant}`;
}
