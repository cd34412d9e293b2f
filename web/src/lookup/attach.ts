import { ApiError, describeError, getJson } from "../api/client";
import type { ListedModel, LoadedModel, ServerInfo } from "../api/manage";
import { readPdf } from "../chat/files";
import { draft, findConversation, saveConversation } from "../chat/library";
import { findContext } from "../chat/useContextLength";
import { go, parseRoute } from "../lib/route";
import { embed, isThere, listEmbedders } from "./embed";
import { type Attaching, foldersOf, putFolder, say, showWork } from "./folders";
import { chooseFiles, decodeText, describeLeftOut, type Found, isPdfPath, leaveOut, MOST_PASSAGES } from "./gather";
import { cutPassages, type Passage } from "./passages";
import { boundTokens, fuse, rank, scoreVectors, takeBest } from "./ranking";
import { type Embedder, type Folder, keepVectors, readPassages, readVectors, sweepVectors } from "./storage";
import { scoreWords } from "./words";

type Note = (step: Attaching["step"], done: number, total: number) => void;

/** Texts of one request: so many are a step of the progress that is shown, and what a stop waits for. */
const BATCH = 16;
/** A server may keep some routes from a key that may ask for answers. */
const FORBIDDEN = [403, 404];
/** Of the best score by words: passages with less share only words that all texts have. */
const LEAST_SHARE = 0.2;
/** More than are ever quoted, as equal ones count once. */
const MOST_RANKED = 50;

const NO_MODEL =
  "The server has no model for vectors, so passages are found by the words that they share with the question. " +
  "Get one (“mlxr pull qwen3-embedding:0.6b”), then compute the vectors.";
const STOPPED = "The vectors are not computed, so passages are found by the words that they share with the question.";

let hasSwept = false;

/** A folder makes a conversation of a draft, whose view stays as it is. */
async function keepDraft(id: string, title: string): Promise<void> {
  if (draft.get().id !== id) return;
  const { view, detail } = parseRoute(location.hash);
  if (view === "chat" && detail === "") {
    const arrived = new Promise((resolve) =>
      window.addEventListener("hashchange", () => setTimeout(resolve), { once: true }),
    );
    go("chat", id);
    await arrived;
  }
  saveConversation({ ...draft.get(), title: title.slice(0, 80) });
}

/** Read a folder into a conversation, and compute its vectors. What goes wrong, or is left out, is told. */
export async function attach(
  conversation: string,
  name: string,
  list: () => Promise<readonly Found[]>,
  controller: AbortController,
): Promise<void> {
  await follow(conversation, name, controller, async (note, signal) => {
    const { passages, files, left } = await readFiles(await list(), note, signal);
    if (passages.length === 0) {
      say(conversation, [`“${name}” has no text that can be looked up.`, ...left]);
      return;
    }
    await keepDraft(conversation, name);
    if (!findConversation(conversation)) return; // it was deleted, or never begun
    const counts = { files, passages: passages.length };
    const folder: Folder = { conversation, name, added: Date.now(), ...counts, model: null, reason: STOPPED, left };
    const problem = await putFolder({ folder, passages });
    say(conversation, [...left, ...(problem ? [describeUnkept(name, problem)] : [])]);
    await makeVectors(folder, passages, note, signal);
    if (!hasSwept) void sweepVectors();
    hasSwept = true;
  });
}

/** Compute the vectors of a folder that is there already. */
export async function recompute(folder: Folder, controller: AbortController): Promise<void> {
  await follow(folder.conversation, folder.name, controller, async (note, signal) => {
    say(folder.conversation, []);
    await makeVectors(folder, await readAll(folder), note, signal);
    const reason = findFolder(folder)?.reason;
    if (reason) say(folder.conversation, [reason]);
  });
}

/** A folder as it is now; none if it was removed, or if another tab put another one of its name in its place. */
function findFolder({ conversation, name, added }: Folder): Folder | undefined {
  return foldersOf(conversation)
    .get()
    ?.find((one) => one.name === name && one.added === added);
}

/** The passages of a folder, which always has some: without them it would be kept, or looked up, as an empty one. */
async function readAll(folder: Folder): Promise<Passage[]> {
  const passages = await readPassages(folder);
  if (passages.length === 0) throw new Error(`This browser does not give the passages of “${folder.name}”.`);
  return passages;
}

/** Show what is under way, with a way to stop it. */
async function follow(
  conversation: string,
  name: string,
  controller: AbortController,
  work: (note: Note, signal: AbortSignal) => Promise<void>,
): Promise<void> {
  const note: Note = (step, done, total) =>
    showWork(conversation, { name, step, done, total, stop: () => controller.abort() });
  note("reads", 0, 0);
  try {
    await work(note, controller.signal);
  } catch (error) {
    if (!controller.signal.aborted) say(conversation, [`“${name}” could not be attached: ${describeError(error)}`]);
  } finally {
    showWork(conversation, null);
  }
}

async function readFiles(found: readonly Found[], note: Note, signal: AbortSignal) {
  const { chosen, left: before } = chooseFiles(found);
  const left = new Map([...before].map(([reason, paths]) => [reason, [...paths]]));
  const passages: Passage[] = [];
  let files = 0;
  for (const [index, { path, file }] of chosen.entries()) {
    signal.throwIfAborted();
    note("reads", index, chosen.length);
    const text = await readText(path, file).catch((error) => new Error(describeError(error)));
    if (text instanceof Error) {
      leaveOut(left, text.message.replace(`“${file.name}”: `, "").replace(/\.$/, ""), path);
      continue;
    }
    const cut = cutPassages(path, text);
    if (passages.length + cut.length > MOST_PASSAGES) {
      leaveOut(left, `beyond the ${MOST_PASSAGES.toLocaleString("en")} passages that a folder may have`, path);
      continue;
    }
    passages.push(...cut);
    files++;
  }
  signal.throwIfAborted(); // a stop while the last file was read
  return { passages, files, left: describeLeftOut(left) };
}

async function readText(path: string, file: File): Promise<string> {
  if (isPdfPath(path)) return (await readPdf(file, false)).text;
  const text = decodeText(await file.arrayBuffer());
  if (text === null) throw new Error("no text");
  return text;
}

/** Compute the vectors of a folder, and keep how it is looked up from now on. */
async function makeVectors(folder: Folder, passages: Passage[], note: Note, signal: AbortSignal): Promise<void> {
  const next = await choose().catch((error) => ({
    model: null,
    reason: signal.aborted ? STOPPED : `${STOPPED} ${describeError(error)}`,
  }));
  // The person may have removed it meanwhile.
  if (findFolder(folder)) await putFolder({ folder: { ...folder, ...next }, passages });

  async function choose(): Promise<Pick<Folder, "model" | "reason">> {
    const texts = passages.map(({ text }) => text);
    note("computes", 0, texts.length);
    const models = await listEmbedders(signal);
    const others = foldersOf(folder.conversation).get() ?? [];
    const model = models.find(({ digest }) => others.some((one) => one.model?.digest === digest)) ?? models[0];
    if (!model) return { model: null, reason: NO_MODEL };
    await fillVectors(model, texts, (done, total) => note("computes", done, total), signal);
    return { model, reason: "" };
  }
}

/** The vectors of texts, by text; those that are not kept are computed, and kept at once. */
async function fillVectors(
  model: Embedder,
  texts: readonly string[],
  tell: (done: number, total: number) => void,
  signal: AbortSignal,
): Promise<Map<string, Float32Array>> {
  const wanted = new Set(texts);
  const vectors = await readVectors(model.digest, wanted);
  const missing = [...wanted].filter((text) => !vectors.has(text));
  for (let at = 0; at < missing.length; at += BATCH) {
    tell(vectors.size, wanted.size);
    const batch = missing.slice(at, at + BATCH);
    const made = await embed(model, batch, "document", signal);
    const named = new Map(batch.flatMap((text, index) => (made[index] ? [[text, made[index]] as const] : [])));
    for (const [text, vector] of named) vectors.set(text, vector);
    await keepVectors(model.digest, named);
  }
  return vectors;
}

/** The folders that were looked up last, as reading them takes longer than comparing. */
let lastRead: { key: string; passages: Passage[]; vectors: Float32Array[] } | null = null;

/** The passages for a question, the best first. Raises an Error in words. */
export async function lookUp(
  folders: readonly Folder[],
  question: string,
  model: string,
  used: number,
  signal: AbortSignal,
): Promise<Passage[]> {
  const context = await askContext(model, signal);
  const rankings: Passage[][] = [];
  for (const digest of new Set(folders.map((folder) => folder.model?.digest))) {
    const group = folders.filter((folder) => folder.model?.digest === digest);
    rankings.push(await rankGroup(group, question, signal));
  }
  return takeBest(fuse(rankings), boundTokens(context, used));
}

/** The passages of folders with one model, or none, the best first. */
async function rankGroup(group: readonly Folder[], question: string, signal: AbortSignal): Promise<Passage[]> {
  const model = group[0]?.model ?? null;
  if (model && !(await isThere(model, signal))) {
    const names = group.map(({ name }) => `“${name}”`).join(", ");
    throw new Error(
      `The model “${model.name}”, which made the vectors of ${names}, is gone or another one by now. ` +
        "Pull it again, or compute the vectors anew.",
    );
  }
  const { passages, vectors } = await readGroup(group, model, signal);
  let scores: Float32Array;
  if (model) {
    const [asked] = await embed(model, [question], "query", signal);
    scores = scoreVectors(vectors, asked ?? new Float32Array());
  } else {
    const texts = passages.map(({ text }) => text);
    scores = scoreWords(texts, question);
  }
  const places = rank(scores, MOST_RANKED, model ? Number.NEGATIVE_INFINITY : LEAST_SHARE * findBest(scores));
  return places.flatMap((at) => passages[at] ?? []);
}

function findBest(scores: Float32Array): number {
  return scores.reduce((best, score) => Math.max(best, score), 0);
}

async function readGroup(group: readonly Folder[], model: Embedder | null, signal: AbortSignal) {
  const key = JSON.stringify(group.map(({ conversation, name, added }) => [conversation, name, added, model?.digest]));
  if (lastRead?.key === key) return lastRead;
  const passages = (await Promise.all(group.map(readAll))).flat();
  const texts = passages.map(({ text }) => text);
  const byText = model ? await fillVectors(model, texts, () => undefined, signal) : new Map<string, Float32Array>();
  const vectors = model ? texts.map((text) => byText.get(text) ?? new Float32Array()) : [];
  lastRead = { key, passages, vectors };
  return lastRead;
}

/** The tokens that the context of a model holds; null where the server does not tell. */
async function askContext(model: string, signal: AbortSignal): Promise<number | null> {
  try {
    const [{ models: loaded }, { models: listed }, usual] = await Promise.all([
      getJson<{ models: LoadedModel[] }>("/api/ps", { signal }),
      getJson<{ models: ListedModel[] }>("/api/tags", { signal }),
      model ? null : getJson<ServerInfo>("/v1/admin/info", { signal }),
    ]);
    return findContext(model || (usual?.default_model ?? ""), loaded, listed);
  } catch (error) {
    if (error instanceof ApiError && FORBIDDEN.includes(error.status)) return null;
    throw error;
  }
}

function describeUnkept(name: string, problem: string): string {
  return `This browser does not keep “${name}” (${problem}), so it lasts as long as this tab.`;
}
