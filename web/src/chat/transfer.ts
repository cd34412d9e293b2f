import { makeId } from "../lib/id";
import type { Passage } from "../lookup/passages";
import { namePassage } from "../lookup/quote";
import { isPdfUrl, isPictureUrl } from "./pictures";
import { isObject, readSettings } from "./settings";
import { listPath, makeTree } from "./tree";
import type {
  AssistantMessage,
  Attachment,
  Candidate,
  Conversation,
  Message,
  Picture,
  Stats,
  Token,
  ToolCall,
} from "./types";

/** A conversation with all its messages. */
export interface Whole {
  conversation: Conversation;
  messages: Message[];
}

const FORMAT = "mlxr-conversations";
const VERSION = 1;

export function exportJson(wholes: readonly Whole[]): string {
  const conversations = wholes.map(({ conversation, messages }) => ({ ...conversation, messages }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** The conversations of an exported file, under new ids. Raises an Error in words where it is something else. */
export function importJson(text: string): Whole[] {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Choose a file that “Export” wrote.");
  }
  if (!isObject(value) || value.format !== FORMAT || !Array.isArray(value.conversations))
    throw new Error("This file has no conversations of this page. Choose a file that “Export” wrote.");
  if (value.version !== VERSION)
    throw new Error(`This file has version ${String(value.version)}, and this page reads version ${VERSION}.`);
  return value.conversations.map((given, index) => readWhole(given, `Conversation ${index + 1}`));
}

/** The branch that is shown, as a Markdown document. */
export function exportMarkdown({ conversation, messages }: Whole): string {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system) parts.push(`> ${conversation.settings.system.replaceAll("\n", "\n> ")}`);
  for (const message of listPath(makeTree(messages, conversation.leaf))) parts.push(...writeMessage(message));
  return `${parts.join("\n\n")}\n`;
}

function writeMessage(message: Message): string[] {
  if (message.role === "tool") return [`## Result of ${message.name}`, fence(message.content, "")];
  if (message.role === "user") {
    const files =
      message.files?.flatMap(({ name, text, url }) =>
        url ? [`**${name}** (a scan)`] : [`**${name}**`, fence(text, "")],
      ) ?? [];
    const pictures = message.pictures?.map((picture) => `**${picture.name}** (a picture)`) ?? [];
    const passages =
      message.passages?.flatMap((passage, index) => [
        `**[${index + 1}] ${namePassage(passage)}**`,
        fence(passage.text, ""),
      ]) ?? [];
    return ["## You", ...pictures, message.content, ...files, ...passages].filter(Boolean);
  }
  const thought = message.reasoning ? [`> ${message.reasoning.replaceAll("\n", "\n> ")}`] : [];
  const calls = message.calls?.flatMap((call) => [`Calls **${call.name}**:`, fence(call.arguments, "json")]) ?? [];
  return [`## ${message.model || "Answer"}`, ...thought, message.content, ...calls].filter(Boolean);
}

/** A code block whose fence is longer than any in the text. */
export function fence(text: string, language: string): string {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
  const ticks = "`".repeat(longest + 1);
  return `${ticks}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${ticks}`;
}

/** Addresses for tools are not taken from files: the person has to allow each one. `readSettings` leaves them out. */
function readWhole(given: unknown, where: string): Whole {
  if (!isObject(given) || !Array.isArray(given.messages)) throw new Error(`${where} of the file has no messages.`);
  const id = makeId();
  const ids = new Map<unknown, string>();
  for (const message of given.messages) if (isObject(message)) ids.set(message.id, makeId());
  const messages = given.messages.map((message, index) =>
    readMessage(message, id, ids, `${where}, message ${index + 1},`),
  );
  const now = Date.now();
  const conversation: Conversation = {
    id,
    title: textOr(given.title, "Imported conversation").slice(0, 200),
    named: given.named === true,
    created: numberOr(given.created, now),
    updated: numberOr(given.updated, now),
    ...(given.pinned === true && { pinned: true }),
    ...(typeof given.folder === "string" && given.folder && { folder: given.folder.slice(0, 60) }),
    settings: readSettings(given.settings),
    leaf: ids.get(given.leaf) ?? null,
  };
  return { conversation, messages };
}

function readMessage(given: unknown, conversation: string, ids: Map<unknown, string>, where: string): Message {
  const id = isObject(given) ? ids.get(given.id) : undefined;
  if (!isObject(given) || typeof given.id !== "string" || id === undefined || typeof given.content !== "string")
    throw new Error(`${where} of the file is broken: it has no id or no content.`);
  const parent = given.parent === null ? null : (ids.get(given.parent) ?? null);
  const common = { id, conversation, parent, created: numberOr(given.created, 0), content: given.content };
  if (given.role === "user") {
    const files = listOf(given.files, readFile);
    const pictures = listOf(given.pictures, readPicture)?.filter(({ url }) => isPictureUrl(url));
    const passages = listOf(given.passages, readPassage);
    return {
      ...common,
      role: "user",
      ...(files && { files }),
      ...(pictures?.length && { pictures }),
      ...(passages && { passages }),
    };
  }
  if (given.role === "tool")
    return { ...common, role: "tool", callId: textOr(given.callId, ""), name: textOr(given.name, "tool") };
  if (given.role !== "assistant") throw new Error(`${where} of the file has the unknown role “${String(given.role)}”.`);
  return { ...common, ...readAnswer(given) };
}

type AnswerFields = Omit<AssistantMessage, "id" | "conversation" | "parent" | "created" | "content">;

function readAnswer(given: Record<string, unknown>): AnswerFields {
  const statuses = ["done", "length", "stopped", "interrupted", "failed"] as const;
  const calls = listOf(given.calls, readCall);
  const tokens = listOf(given.tokens, readToken);
  const stats = readStats(given.stats);
  return {
    role: "assistant",
    status: statuses.find((status) => status === given.status) ?? "interrupted",
    model: textOr(given.model, ""),
    ...(Number.isFinite(given.seed) && { seed: given.seed as number }),
    ...(typeof given.reasoning === "string" && { reasoning: given.reasoning }),
    ...(Number.isFinite(given.reasoningMs) && { reasoningMs: given.reasoningMs as number }),
    ...(typeof given.error === "string" && { error: given.error }),
    ...(calls && { calls }),
    ...(tokens && { tokens }),
    ...(stats && { stats }),
  };
}

function readFile(given: Record<string, unknown>): Attachment {
  const url = textOr(given.url, "");
  return { name: textOr(given.name, "file"), text: textOr(given.text, ""), ...(isPdfUrl(url) && { url }) };
}

function readPicture(given: Record<string, unknown>): Picture {
  const { name, url, width, height } = given;
  return {
    name: textOr(name, "picture"),
    url: textOr(url, ""),
    width: numberOr(width, 0),
    height: numberOr(height, 0),
  };
}

function readPassage(given: Record<string, unknown>): Passage {
  return { path: textOr(given.path, ""), line: numberOr(given.line, 1), text: textOr(given.text, "") };
}

function readCall(given: Record<string, unknown>): ToolCall {
  return { id: textOr(given.id, ""), name: textOr(given.name, ""), arguments: textOr(given.arguments, "") };
}

function readToken(given: Record<string, unknown>): Token {
  const at = Number.isFinite(given.at) ? (given.at as number) : null;
  return { ...readCandidate(given), at, top: listOf(given.top, readCandidate) ?? [] };
}

function readCandidate(given: Record<string, unknown>): Candidate {
  const bytes = Array.isArray(given.bytes) ? given.bytes.filter((byte) => Number.isInteger(byte)) : null;
  return { text: textOr(given.text, ""), logprob: numberOr(given.logprob, 0), ...(bytes && { bytes }) };
}

function readStats(given: unknown): Stats | undefined {
  if (!isObject(given)) return undefined;
  const orNull = (value: unknown) => (Number.isFinite(value) ? (value as number) : null);
  return {
    firstTokenMs: orNull(given.firstTokenMs),
    tokensPerSecond: orNull(given.tokensPerSecond),
    promptTokens: numberOr(given.promptTokens, 0),
    cachedTokens: numberOr(given.cachedTokens, 0),
    answerTokens: numberOr(given.answerTokens, 0),
    queueMs: numberOr(given.queueMs, 0),
  };
}

function listOf<T>(given: unknown, read: (entry: Record<string, unknown>) => T): T[] | undefined {
  return Array.isArray(given) ? given.filter(isObject).map(read) : undefined;
}

function textOr(value: unknown, otherwise: string): string {
  return typeof value === "string" ? value : otherwise;
}

function numberOr(value: unknown, otherwise: number): number {
  return typeof value === "number" && Number.isFinite(value) ? value : otherwise;
}
