import type { Passage } from "../lookup/passages";

/** A call of a tool that the model made; `arguments` is JSON text. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** A token that could have stood in a place, and the natural logarithm of its probability. */
export interface Candidate {
  text: string;
  logprob: number;
  /** The token's bytes, where they are not a text of their own (a part of a character). */
  bytes?: number[];
}

/** A token of an answer. `at` is where it begins in the content; null inside a character. */
export interface Token extends Candidate {
  at: number | null;
  top: Candidate[];
}

/** What an answer cost. Times are milliseconds. */
export interface Stats {
  /** From sending the request to the first token, as this browser saw it. */
  firstTokenMs: number | null;
  tokensPerSecond: number | null;
  promptTokens: number;
  cachedTokens: number;
  answerTokens: number;
  queueMs: number;
}

/** How an answer stands. "growing" in a stored message means that the page that wrote it is gone or still writes. */
export type Status = "growing" | "done" | "length" | "stopped" | "interrupted" | "failed";

/** A file that was dropped into a message: its text, or a PDF of pictures as a data: address, whose pages are seen. */
export interface Attachment {
  name: string;
  text: string;
  url?: string;
}

/** A picture of a message. The `url` is a data: address, as it is sent; sizes are those of its pixels. */
export interface Picture {
  name: string;
  url: string;
  width: number;
  height: number;
}

/** What goes with a message that is being written. */
export interface Attached {
  files: Attachment[];
  pictures: Picture[];
}

export const NOTHING_ATTACHED: Attached = { files: [], pictures: [] };

interface Common {
  id: string;
  conversation: string;
  /** The message before it; null at the beginning. */
  parent: string | null;
  created: number;
  content: string;
}

export interface UserMessage extends Common {
  role: "user";
  files?: Attachment[];
  pictures?: Picture[];
  /** What was found in the conversation's folders for it; not there where there was none to look it up in. */
  passages?: Passage[];
}

export interface ToolMessage extends Common {
  role: "tool";
  callId: string;
  name: string;
}

export interface AssistantMessage extends Common {
  role: "assistant";
  status: Status;
  model: string;
  seed?: number;
  reasoning?: string;
  reasoningMs?: number;
  calls?: ToolCall[];
  tokens?: Token[];
  stats?: Stats;
  /** Why it failed or broke off, in words. */
  error?: string;
}

export type Message = UserMessage | ToolMessage | AssistantMessage;

/** How answers of a conversation are made. Empty texts and null leave the choice to the server. */
export interface Settings {
  model: string;
  system: string;
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  presencePenalty: number | null;
  frequencyPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  /** Texts before which the answer ends, one a line. */
  stop: string;
  reasoning: "" | "none" | "low" | "medium" | "high";
  /** A JSON array of tools as OpenAI writes them. */
  tools: string;
  toolChoice: "auto" | "required" | "none";
  /** By the tool's name: who answers its calls. */
  toolUrls: Record<string, ToolUrl>;
  /** By the tool's name: the MCP server that has it. */
  toolServers: Record<string, ToolServer>;
  /** Programs that the model writes run in the sandbox without a question. */
  runsScripts: boolean;
  /** A JSON schema that the answer keeps to. */
  schema: string;
  /** The model continues the text of the messages, as one without a chat template must. */
  asText: boolean;
  /** Ask for the probabilities of all tokens. */
  showTokens: boolean;
}

/** An address that the person allowed to get a tool's arguments and to answer with its result. */
export interface ToolUrl {
  url: string;
  /** Send calls there without asking each time. */
  automatic: boolean;
}

/** A tool of an MCP server, which the server calls for the page. */
export interface ToolServer {
  /** The name of a program that the owner allowed, or an address. */
  server: string;
  /** What the server calls the tool. */
  tool: string;
  /** Call it without asking each time. */
  allowed: boolean;
}

export interface Conversation {
  id: string;
  title: string;
  /** Whether the person chose the title; otherwise it follows the first message. */
  named: boolean;
  created: number;
  updated: number;
  /** It stands above all others in the list. */
  pinned?: boolean;
  /** The folder that it lies in. */
  folder?: string;
  settings: Settings;
  /** The last message of the branch that is shown; null while there is none. */
  leaf: string | null;
}

export const DEFAULT_SETTINGS: Settings = {
  model: "",
  system: "",
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  repetitionPenalty: null,
  presencePenalty: null,
  frequencyPenalty: null,
  maxTokens: null,
  seed: null,
  stop: "",
  reasoning: "",
  tools: "",
  toolChoice: "auto",
  toolUrls: {},
  toolServers: {},
  runsScripts: false,
  schema: "",
  asText: false,
  showTokens: false,
};
