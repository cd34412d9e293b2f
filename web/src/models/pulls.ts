import { describeError, isAbort } from "../api/client";
import { type PullLine, pullModel } from "../api/manage";
import { savedStore } from "../lib/saved";
import { createStore } from "../lib/store";

/** A pull of this tab: how far it is, in bytes over all files it has told of. */
export interface Pull {
  model: string;
  state: "running" | "done" | "stopped" | "failed";
  /** What is being done, or the error. */
  text: string;
  doneBytes: number;
  totalBytes: number;
  bytesPerSecond: number;
  /** Whether something of it has come, now or before, so that it can be resumed. */
  hasSome: boolean;
}

/** The pulls of this tab, newest first. They go on while other views are open. */
export const pulls = createStore<readonly Pull[]>([]);

/** Names of pulls that were not finished, also by tabs that are gone. */
export const unfinished = savedStore<string[]>("unfinished-pulls", [], isNames);

/** The name that the form begins with. */
export const typedName = createStore("");

const stops = new Map<string, AbortController>();
const SPEED_OVER_MS = 3_000;

/** Pull a model, or go on with a pull that was stopped. Resolves when it has ended, however it did. */
export async function startPull(model: string, onDone: () => void): Promise<void> {
  if (stops.has(model)) return;
  const stop = new AbortController();
  stops.set(model, stop);
  const hadSome = unfinished.get().includes(model);
  unfinished.set([...unfinished.get().filter((name) => name !== model), model]);
  const tally = new PullTally();
  const show = (change: Partial<Pull>) => put(model, change);
  pulls.set(pulls.get().filter((pull) => pull.model !== model));
  show({ state: "running", text: "asking the hub", hasSome: hadSome });
  try {
    for await (const line of pullModel(model, stop.signal)) {
      if (line.error !== undefined) throw new Error(line.error);
      tally.add(line, performance.now());
      const read = tally.read();
      show({ text: line.status, ...read, hasSome: hadSome || read.doneBytes > 0 });
    }
    show({ state: "done", text: "It is here." });
    unfinished.set(unfinished.get().filter((name) => name !== model));
    onDone();
  } catch (error) {
    const stopped = isAbort(error);
    const hasSome = hadSome || tally.read().doneBytes > 0;
    if (!hasSome) unfinished.set(unfinished.get().filter((name) => name !== model));
    const text = hasSome ? "Stopped. What came is kept; resume goes on from there." : "Stopped before anything came.";
    show({ state: stopped ? "stopped" : "failed", text: stopped ? text : explainRefusal(error) });
  } finally {
    stops.delete(model);
  }
}

export function stopPull(model: string): void {
  stops.get(model)?.abort();
}

/** Take a pull that has ended off the list. */
export function dismissPull(model: string): void {
  if (stops.has(model)) return;
  pulls.set(pulls.get().filter((pull) => pull.model !== model));
  unfinished.set(unfinished.get().filter((name) => name !== model));
}

/** Take a pull off the list and its name back into the form. */
export function editPull(model: string): void {
  dismissPull(model);
  typedName.set(model);
}

/** Why the hub or the server refused, without the name of the field, which is that of a program. */
function explainRefusal(error: unknown): string {
  return describeError(error).replace(/^model: /, "");
}

function put(model: string, change: Partial<Pull>): void {
  const none: Pull = {
    model,
    state: "running",
    text: "",
    doneBytes: 0,
    totalBytes: 0,
    bytesPerSecond: 0,
    hasSome: false,
  };
  const all = pulls.get();
  pulls.set(
    all.some((pull) => pull.model === model)
      ? all.map((pull) => (pull.model === model ? { ...pull, ...change } : pull))
      : [{ ...none, ...change }, ...all],
  );
}

/** Sums up the lines of a pull: bytes over all its files, and the speed over the last seconds. */
export class PullTally {
  private readonly files = new Map<string, { done: number; total: number }>();
  private readonly marks: { at: number; done: number }[] = [];

  add(line: PullLine, at: number): void {
    if (line.digest === undefined || line.total === undefined) return;
    this.files.set(line.digest, { done: line.completed ?? 0, total: line.total });
    this.marks.push({ at, done: this.done });
    while (this.marks.length > 2 && at - (this.marks[0]?.at ?? at) > SPEED_OVER_MS) this.marks.shift();
  }

  read(): Pick<Pull, "doneBytes" | "totalBytes" | "bytesPerSecond"> {
    const first = this.marks[0];
    const last = this.marks.at(-1);
    const seconds = first && last ? (last.at - first.at) / 1000 : 0;
    return {
      doneBytes: this.done,
      totalBytes: this.sum((file) => file.total),
      bytesPerSecond: first && last && seconds > 0 ? (last.done - first.done) / seconds : 0,
    };
  }

  private get done(): number {
    return this.sum((file) => file.done);
  }

  private sum(of: (file: { done: number; total: number }) => number): number {
    let sum = 0;
    for (const file of this.files.values()) sum += of(file);
    return sum;
  }
}

function isNames(value: unknown): value is string[] {
  return Array.isArray(value) && value.every((name) => typeof name === "string");
}
