import { tellTabs } from "../chat/tabs";
import { createStore, type Store } from "../lib/store";
import { tell } from "../lib/toasts";
import type { Found } from "./gather";
import type { Passage } from "./passages";
import { type Folder, keepFolder, listFolders, sweepVectors, takeFolders, type WholeFolder } from "./storage";

/** A folder that waits for another one, is being read, or whose vectors are being computed. */
export interface Attaching {
  name: string;
  step: "waits" | "reads" | "computes";
  done: number;
  total: number;
  stop(): void;
}

/** By conversation. */
export const attaching = createStore<ReadonlyMap<string, Attaching>>(new Map());

/** By conversation: what there is to say of the folder that was attached last, a sentence each. */
export const notices = createStore<ReadonlyMap<string, readonly string[]>>(new Map());

/** As long as a removal can be undone, the vectors stay. */
const SWEEP_MS = 15_000;

const shown = new Map<string, Store<readonly Folder[] | null>>();
let last: Promise<void> = Promise.resolve();
/** The folders whose turn has not come, in the order in which they were attached. */
let waiting: { conversation: string; state: Attaching }[] = [];

/** The folders of a conversation; null until they are read. */
export function foldersOf(conversation: string): Store<readonly Folder[] | null> {
  const known = shown.get(conversation);
  if (known) return known;
  const store = createStore<readonly Folder[] | null>(null);
  shown.set(conversation, store);
  void refreshFolders(conversation);
  return store;
}

/** Read the folders of a conversation anew: this tab or another one has changed them. */
export async function refreshFolders(conversation: string): Promise<void> {
  shown.get(conversation)?.set(await listFolders(conversation));
}

/** Keep a folder, and show it. Answers why the browser does not keep it, in words. */
export async function putFolder(whole: WholeFolder): Promise<string | null> {
  const problem = await keepFolder(whole);
  await announce(whole.folder.conversation);
  return problem;
}

async function announce(conversation: string): Promise<void> {
  await refreshFolders(conversation);
  tellTabs({ kind: "folders", conversation });
}

/** Read a folder, one after the other; what goes wrong is told in `notices`. */
export function attachFolder(conversation: string, name: string, list: () => Promise<readonly Found[]>): Promise<void> {
  return inTurn(conversation, name, (loaded, controller) => loaded.attach(conversation, name, list, controller));
}

/** Compute the vectors of a folder that is looked up by its words, or whose model is gone. */
export function computeVectors(folder: Folder): Promise<void> {
  return inTurn(folder.conversation, folder.name, (loaded, controller) => loaded.recompute(folder, controller));
}

type Loaded = NonNullable<Awaited<ReturnType<typeof loadAttach>>>;

/** Do some work once all that was asked for before is done, in whatever conversation. */
function inTurn(
  conversation: string,
  name: string,
  work: (loaded: Loaded, controller: AbortController) => Promise<void>,
): Promise<void> {
  const controller = new AbortController();
  const stop = () => {
    controller.abort();
    end();
  };
  const step: Attaching["step"] = waiting.length + attaching.get().size > 0 ? "waits" : "reads";
  const one = { conversation, state: { name, step, done: 0, total: 0, stop } };
  const end = () => {
    waiting = waiting.filter((other) => other !== one);
    if (attaching.get().get(conversation) === one.state) showWork(conversation, null);
  };
  waiting.push(one);
  if (!attaching.get().has(conversation)) showWork(conversation, one.state);
  last = last.then(async () => {
    const loaded = controller.signal.aborted ? null : await loadAttach(conversation);
    const isWanted = loaded !== null && !controller.signal.aborted;
    waiting = waiting.filter((other) => other !== one);
    if (isWanted) await work(loaded, controller);
    else end();
  });
  return last;
}

/** Show what goes on for a conversation; where that has ended, what waits. */
export function showWork(conversation: string, state: Attaching | null): void {
  const next = new Map(attaching.get());
  const shown = state ?? waiting.find((one) => one.conversation === conversation)?.state;
  if (shown) next.set(conversation, shown);
  else next.delete(conversation);
  attaching.set(next);
}

async function loadAttach(conversation: string) {
  try {
    return await import("./attach");
  } catch {
    say(conversation, [NOT_LOADED]);
    return null;
  }
}

const NOT_LOADED = "The server does not answer, so the files cannot be read. Try again when it runs.";

export async function removeFolder({ conversation, name }: Folder): Promise<void> {
  const removed = await takeFolders(conversation, [name]);
  await announce(conversation);
  say(conversation, []);
  tell(`Removed “${name}” from the chat.`, () => removed.forEach((whole) => void putFolder(whole)));
  sweepLater();
}

/** A conversation is gone: what goes on for it ends, and finds no folder any more that it could keep. */
export function leaveFolders(conversation: string): void {
  shown.delete(conversation);
  for (const one of waiting.filter((other) => other.conversation === conversation)) one.state.stop();
  attaching.get().get(conversation)?.stop();
}

/** Forget the folders of a conversation; what is answered brings them back. */
export async function forgetFolders(conversation: string): Promise<() => Promise<void>> {
  leaveFolders(conversation);
  const removed = await takeFolders(conversation);
  if (removed.length > 0) sweepLater();
  return async () => {
    for (const whole of removed) await putFolder(whole);
  };
}

function sweepLater(): void {
  setTimeout(() => void sweepVectors(), SWEEP_MS);
}

/**
 * The passages for a question, the best first; undefined where the conversation has no folder. `used` tokens of the
 * context hold the conversation. Raises an Error in words where they cannot be looked up.
 */
export async function findPassages(
  conversation: string,
  question: string,
  model: string,
  used: number,
  signal: AbortSignal,
): Promise<Passage[] | undefined> {
  const folders = foldersOf(conversation).get() ?? (await listFolders(conversation));
  if (folders.length === 0 || question.trim() === "") return undefined;
  const { lookUp } = await import("./attach").catch(() => {
    throw new Error("The server does not answer, so the folder cannot be looked up. Try again when it runs.");
  });
  return lookUp(folders, question, model, used, signal);
}

export function say(conversation: string, sentences: readonly string[]): void {
  notices.set(new Map(notices.get()).set(conversation, sentences));
}
