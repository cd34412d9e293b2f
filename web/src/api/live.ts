/** The events of `GET /v1/admin/live`; docs/page-live.md says what each field means and how changes are applied. */

/** `count` pages from number `first` on have this code: holder + 4 × store. */
export type PageRun = [first: number, count: number, code: number];

/** Pages of layers whose cache has one shape. */
export interface GroupState {
  group: number;
  name: string;
  layers: number;
  pages: number;
  page_size: number;
  page_bytes: number;
  /** Recurrent layers hold states: a page is a slot for the state of all of them, a cached one is a snapshot. */
  holds: "pages" | "states";
  /** Tokens of prompts that were computed because this group had nothing where another one had. */
  short_tokens: number;
  runs: PageRun[];
}

/** What happened to the pages of a group. */
export interface GroupChange {
  group: number;
  runs: PageRun[];
  /** Pages that were given up; one may be listed several times. */
  evicted: number[];
  /** Copies on write. */
  copied: [source: number, target: number][];
  /** What was added. */
  short_tokens: number;
}

/** The pages of a sequence in one group from place `start` on; -1 for those given back. */
export interface TablePart {
  group: number;
  start: number;
  pages: number[];
}

/** An answer that runs. */
export interface SequenceRow {
  request: number;
  index: number;
  client: string | null;
  priority: number;
  phase: "prefill" | "decode";
  prompt_tokens: number;
  cached_tokens: number;
  tokens: number;
  written_tokens: number;
  end_tokens: number;
  tables: TablePart[];
}

export interface Queue {
  waiting: number;
  running: number;
}

/** Totals in a snapshot, increments in a change (where those that are 0 are left out). */
export interface Counters {
  memory_hit_tokens: number;
  disk_hit_tokens: number;
  peer_hit_tokens: number;
  missed_tokens: number;
  steps: number;
  failed_steps: number;
  prefill_tokens: number;
  decode_tokens: number;
  drafted_tokens: number;
  accepted_tokens: number;
  recomputed_tokens: number;
  preemptions: number;
  late_answers: number;
  refused_requests: number;
  evicted_pages: number;
  dropped_pages: number;
  copied_bytes: number;
}

/** The sum of one step or of several that followed one another. */
export interface StepSum {
  steps: number;
  seconds: number;
  prefill_tokens: number;
  decode_tokens: number;
  read_bytes: number;
  macs: number;
}

/** This model's pages on disk. */
export interface StoreState {
  entries: number;
  bytes: number;
  queued_pages: number;
}

/** How often a kernel ran: in all in a snapshot, since the event before in a change. */
export interface Dispatch {
  operator: string;
  implementation: string;
  variant: string;
  count: number;
}

/** What the machine can do, as the probe measured it. */
export interface MachineLimits {
  read_bytes_per_s: number;
  int8_macs_per_s: number;
  measured_at: number;
}

export interface LogEntry {
  time: number;
  kind: "started" | "ended" | "preempted" | "refused" | "evicted" | "dropped" | "failed";
  reason: string;
  request: number | null;
  index: number | null;
  text: string;
}

export interface WatchedModel {
  name: string;
  architecture: string;
  device: string;
  isa: string;
  threads: number;
  context_tokens: number;
  kv_cache: string;
  weight_bytes: number;
}

/** All there is to know; replaces what was known before. */
export interface Snapshot {
  time: number;
  models: string[];
  model: WatchedModel | null;
  groups: GroupState[];
  sequences: SequenceRow[];
  queue: Queue;
  counters: Counters;
  store: StoreState | null;
  kernels: Dispatch[];
  limits: MachineLimits | null;
  limits_hint: string | null;
}

/** What has changed since the event before; sections without a change are left out. */
export interface Change {
  time: number;
  seconds: number;
  models?: string[];
  groups?: GroupChange[];
  sequences?: SequenceRow[];
  gone?: [request: number, index: number][];
  queue?: Queue;
  counters?: Partial<Counters>;
  steps?: StepSum[];
  store?: StoreState;
  kernels?: Dispatch[];
  limits?: MachineLimits;
  log?: LogEntry[];
  log_left_out?: number;
}

/** The reply of `GET /v1/admin/pages/{page}`. */
export interface PageDetails {
  model: string;
  group: number;
  page: number;
  holder: "free" | "private" | "shared" | "cached";
  store: "none" | "waiting" | "on_disk";
  references: number;
  sequences: { request: number; index: number; place: number }[];
  place: number | null;
  reuses: number | null;
  followers: number | null;
  age_pages: number | null;
}
