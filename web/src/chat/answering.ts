import { streamChat, streamText } from "../api/chat";
import { isAbort } from "../api/client";
import { readSampling } from "../api/sampling";
import { makeId } from "../lib/id";
import { createStore, type Store } from "../lib/store";
import type { Passage } from "../lookup/passages";
import { explain } from "./explain";
import { Growth } from "./growth";
import { leave } from "./left";
import { addMessage, changeMessage, changeSettings, findConversation, keepMessage, loadTree } from "./library";
import { nameConversation } from "./titles";
import { answerCalls } from "./tools";
import { listPath } from "./tree";
import {
  type AssistantMessage,
  type Attached,
  type Message,
  NOTHING_ATTACHED,
  type Token,
  type ToolMessage,
} from "./types";
import { writeRequest, writeTextRequest } from "./wire";

/** An answer that grows in this tab. */
export interface Run {
  readonly conversation: string;
  /** The message as it was at the last frame. */
  readonly shown: Store<AssistantMessage>;
  /** How much of the prompt the server has read. */
  readonly progress: Store<Growth["progress"]>;
  readonly thinking: Store<boolean>;
  stop(): void;
}

/** The answers that grow in this tab, by message id. */
export const runs = createStore<ReadonlyMap<string, Run>>(new Map());

const KEEP_MS = 400;
/** A page that is left breaks its connections first. Wait, so that its answers are kept as left, not as broken. */
const LEAVING_MS = 200;
const MOST_ROUNDS = 10;

/** Send a message of the person behind `parent`, with the passages that were found for it, and have it answered. */
export function sendMessage(
  id: string,
  parent: string | null,
  content: string,
  { files, pictures }: Attached = NOTHING_ATTACHED,
  passages?: readonly Passage[],
): void {
  const message: Message = {
    ...makeCommon(id, parent, content),
    role: "user",
    ...(files.length > 0 && { files }),
    ...(pictures.length > 0 && { pictures }),
    ...(passages && { passages: [...passages] }),
  };
  addMessage(message);
  void answer(id, message.id);
}

/** Ask for another answer behind a message, next to those that there are. */
export async function answer(id: string, parent: string | null): Promise<void> {
  await grow({ ...makeAnswer(id, parent, ""), status: "growing" }, false);
}

/** Ask for more of an answer; of one that is still empty, for the whole of it. */
export async function continueAnswer(message: AssistantMessage): Promise<void> {
  await grow(message, Boolean(message.content || message.reasoning));
}

/** Ask for an answer that was refused again, and from now on as the continuation of a text. */
export async function continueAsText(message: AssistantMessage): Promise<void> {
  changeSettings(message.conversation, { asText: true });
  await continueAnswer(message);
}

/** A version of an answer with another text; with `tokens`, those of the text, the answer goes on from there. */
export function branchAnswer(from: AssistantMessage, content: string, tokens?: readonly Token[]): void {
  const message: AssistantMessage = {
    ...makeAnswer(from.conversation, from.parent, content),
    ...(from.reasoning !== undefined && { reasoning: from.reasoning }),
    ...(from.reasoningMs !== undefined && { reasoningMs: from.reasoningMs }),
    ...(tokens && { tokens: [...tokens] }),
    model: from.model,
  };
  addMessage(message);
  if (tokens) void continueAnswer(message);
}

/** A version of the person's message with another text, and an answer to it. */
export function branchMessage(
  from: Message & { role: "user" },
  content: string,
  passages: readonly Passage[] | undefined,
): void {
  const attached = { files: from.files ?? [], pictures: from.pictures ?? [] };
  sendMessage(from.conversation, from.parent, content, attached, passages);
}

/** How many tokens of the context a path takes, as its last answer tells. */
export function countUsed(path: readonly Message[]): number {
  const stats = path.findLast((message) => message.role === "assistant" && message.stats) as
    | AssistantMessage
    | undefined;
  return stats?.stats ? stats.stats.promptTokens + stats.stats.answerTokens : 0;
}

/** Give the results of an answer's calls, in their order, and have the model go on. */
export async function giveResults(message: AssistantMessage, results: readonly string[]): Promise<void> {
  let parent = message.id;
  (message.calls ?? []).forEach((call, index) => {
    const common = makeCommon(message.conversation, parent, results[index] ?? "");
    const result: ToolMessage = { ...common, role: "tool", callId: call.id, name: call.name };
    addMessage(result);
    parent = result.id;
  });
  await answer(message.conversation, parent);
}

/** A version of a tool's result with another text, the results after it again, and a new answer. */
export async function editResult(from: ToolMessage, content: string): Promise<void> {
  const path = listPath(await loadTree(from.conversation));
  const at = path.findIndex((message) => message.id === from.id);
  let parent = from.parent;
  for (const message of path.slice(at)) {
    if (message.role !== "tool") break;
    const common = makeCommon(from.conversation, parent, message.id === from.id ? content : message.content);
    addMessage({ ...message, ...common });
    parent = common.id;
  }
  await answer(from.conversation, parent);
}

function makeCommon(conversation: string, parent: string | null, content: string) {
  return { id: makeId(), conversation, parent, created: Date.now(), content };
}

function makeAnswer(conversation: string, parent: string | null, content: string): AssistantMessage {
  return { ...makeCommon(conversation, parent, content), role: "assistant", status: "done", model: "" };
}

async function grow(given: AssistantMessage, continues: boolean): Promise<void> {
  const tree = await loadTree(given.conversation);
  const conversation = findConversation(given.conversation);
  if (!conversation || runs.get().has(given.id)) return;
  const settings = conversation.settings;
  const seed = settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] ?? 0;
  const message: AssistantMessage = { ...given, status: "growing", seed, model: given.model || settings.model };
  const path = listPath(tree, continues ? given.id : given.parent);
  const controller = new AbortController();
  const growth = new Growth(message);
  const run = follow(growth, message, controller);
  if (tree.messages.has(given.id)) changeMessage(message);
  else addMessage(message);
  setRun(message.id, run);
  const last = await read();
  run.end();
  changeMessage(last);
  setRun(message.id, null);
  if (last.status === "done" && !last.calls && !continues && path.length === 1)
    void nameConversation([...path, last], last.model);
  if (last.status === "done" && last.calls) await answerAutomatically(last);

  async function read(): Promise<AssistantMessage> {
    try {
      const usual = await readSampling(settings.model).catch(() => ({})); // who asks for the answer hears the reason
      const chunks = settings.asText
        ? streamText(writeTextRequest(path, settings, seed, usual), controller.signal)
        : streamChat(writeRequest(path, settings, seed, continues, usual), controller.signal);
      for await (const chunk of chunks) {
        growth.push(chunk);
        run.note();
      }
      return growth.read("complete");
    } catch (error) {
      if (isAbort(error) || controller.signal.aborted) return growth.read("stopped");
      await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
      return growth.read(growth.isEmpty ? "failed" : "interrupted", explain(error));
    }
  }
}

/** Show a growing answer once a frame, and store it now and then and when the page goes away. */
function follow(growth: Growth, message: AssistantMessage, controller: AbortController) {
  const shown = createStore(message);
  const progress = createStore<Growth["progress"]>(null);
  const thinking = createStore(false);
  let frame = 0;
  const keep = () => keepMessage(growth.read("growing"), true);
  const timer = window.setInterval(keep, KEEP_MS);
  const keepNow = () => leave(growth.read("growing"));
  window.addEventListener("pagehide", keepNow);
  return {
    conversation: message.conversation,
    shown,
    progress,
    thinking,
    stop: () => controller.abort(),
    note() {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        shown.set(growth.read("growing"));
        progress.set(growth.isEmpty ? growth.progress : null);
        thinking.set(growth.isThinking);
      });
    },
    end() {
      cancelAnimationFrame(frame);
      window.clearInterval(timer);
      window.removeEventListener("pagehide", keepNow);
    },
  };
}

function setRun(id: string, run: Run | null): void {
  const next = new Map(runs.get());
  if (run) next.set(id, run);
  else next.delete(id);
  runs.set(next);
}

/** Let built-in tools and addresses that may be asked without a question answer the calls, if they can all of them. */
async function answerAutomatically(message: AssistantMessage): Promise<void> {
  const settings = findConversation(message.conversation)?.settings;
  const calls = message.calls ?? [];
  if (!settings) return;
  const path = listPath(await loadTree(message.conversation), message.id);
  const asked = path.slice(path.findLastIndex((one) => one.role === "user"));
  if (asked.filter((one) => one.role === "assistant").length > MOST_ROUNDS) return;
  const results = await answerCalls(calls, settings);
  if (results) await giveResults(message, results);
}
