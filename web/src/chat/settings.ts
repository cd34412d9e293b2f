import type { ChatBody } from "../api/chat";
import { type Sampling, SENT } from "../api/sampling";
import { DEFAULT_SETTINGS, type Settings } from "./types";

/** A number that a request may carry, with its bounds as docs/sampling.md has them. */
export interface NumberField {
  key:
    | "temperature"
    | "topP"
    | "topK"
    | "minP"
    | "repetitionPenalty"
    | "presencePenalty"
    | "frequencyPenalty"
    | "maxTokens"
    | "seed";
  /** The request's field. */
  wire: string;
  label: string;
  hint: string;
  low: number;
  high: number;
  step: number;
}

export const NUMBERS: readonly NumberField[] = [
  field("temperature", "temperature", "Temperature", "0 takes the likeliest token; higher varies more.", 0, 5, 0.1),
  field("topP", "top_p", "Top p", "Keeps the likeliest tokens that reach this probability together.", 0, 1, 0.05),
  field("topK", "top_k", "Top k", "Keeps this many of the likeliest tokens; 0 keeps all.", 0, 1000, 1),
  field("minP", "min_p", "Min p", "Keeps tokens at least this times as likely as the likeliest.", 0, 1, 0.01),
  field(
    "repetitionPenalty",
    "repetition_penalty",
    "Repetition penalty",
    "1 leaves repeated tokens alone.",
    0.1,
    5,
    0.05,
  ),
  field("presencePenalty", "presence_penalty", "Presence penalty", "Taken from tokens that occurred.", -2, 2, 0.1),
  field("frequencyPenalty", "frequency_penalty", "Frequency penalty", "Taken for each occurrence.", -2, 2, 0.1),
  field("maxTokens", "max_tokens", "Max tokens", "Of an answer; empty goes on until the context is full.", 1, 1e6, 1),
  field("seed", "seed", "Seed", "The same seed gives the same answer; empty draws one.", 0, 2 ** 32 - 1, 1),
];

function field(
  key: NumberField["key"],
  wire: string,
  label: string,
  hint: string,
  low: number,
  high: number,
  step: number,
): NumberField {
  return { key, wire, label, hint, low, high, step };
}

/** What a person typed into a number's field: null for nothing; a sentence where it is wrong. */
export function readNumber(text: string, { low, high, step, label }: NumberField): number | null | string {
  if (text.trim() === "") return null;
  const value = Number(text.trim().replace(",", "."));
  if (!Number.isFinite(value)) return `${label} is a number.`;
  if (step === 1 && !Number.isInteger(value)) return `${label} is a whole number.`;
  if (value < low || value > high)
    return `${label} lies between ${low.toLocaleString("en")} and ${high.toLocaleString("en")}.`;
  return value;
}

/** A tool of the list that the person wrote. */
export interface ToolDefinition {
  type: "function";
  function: { name: string; description?: string; parameters?: unknown };
}

/** The tools that a text of JSON defines; a sentence where it is wrong. */
export function readTools(text: string): ToolDefinition[] | string {
  if (text.trim() === "") return [];
  const value = readJson(text);
  if (value instanceof SyntaxError) return `This is not JSON: ${value.message}`;
  if (!Array.isArray(value)) return "Tools are a list: [ … ].";
  const tools: ToolDefinition[] = [];
  for (const [index, entry] of value.entries()) {
    const given = isObject(entry) && isObject(entry.function) ? entry.function : entry;
    if (!isObject(given) || typeof given.name !== "string" || given.name === "")
      return `Tool ${index + 1} has no name. A tool is {"type": "function", "function": {"name": …, "parameters": …}}.`;
    if (tools.some((tool) => tool.function.name === given.name)) return `There are two tools called “${given.name}”.`;
    tools.push({ type: "function", function: given as ToolDefinition["function"] });
  }
  return tools;
}

/** The schema that a text of JSON is; null for none; a sentence where it is wrong. */
export function readSchema(text: string): Record<string, unknown> | null | string {
  if (text.trim() === "") return null;
  const value = readJson(text);
  if (value instanceof SyntaxError) return `This is not JSON: ${value.message}`;
  return isObject(value) ? value : 'A schema is an object: {"type": "object", "properties": { … }}.';
}

/**
 * The fields of a request that the settings ask for; of the numbers that they leave open those of `usual` that the page
 * sends. Raises an Error in words where tools or schema are wrong.
 */
export function writeSettings(settings: Settings, seed: number, usual: Sampling = {}): Omit<ChatBody, "messages"> {
  const body: Record<string, unknown> = {};
  if (settings.model) body.model = settings.model;
  for (const wire of SENT) if (usual[wire] !== undefined) body[wire] = usual[wire];
  for (const { key, wire } of NUMBERS) if (settings[key] !== null) body[wire] = settings[key];
  body.seed = seed;
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length > 0) body.stop = stop;
  if (settings.reasoning) body.reasoning_effort = settings.reasoning;
  const tools = readTools(settings.tools);
  if (typeof tools === "string") throw new Error(`The tools of this conversation are wrong. ${tools}`);
  if (tools.length > 0) {
    body.tools = tools;
    body.tool_choice = settings.toolChoice;
  }
  const schema = readSchema(settings.schema);
  if (typeof schema === "string") throw new Error(`The schema of this conversation is wrong. ${schema}`);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (settings.showTokens) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  return body;
}

/** How many alternatives are asked for each token. */
export const TOP = 8;

/** What the person allows a conversation, here and not by a file. */
const PERMISSIONS: ReadonlySet<string> = new Set<keyof Settings>(["toolUrls", "toolServers", "runsScripts"]);

/** Settings from elsewhere (a file, an older version): what has the right type counts, the rest is as by default. */
export function readSettings(value: unknown): Settings {
  const settings: Record<string, unknown> = { ...DEFAULT_SETTINGS };
  if (!isObject(value)) return DEFAULT_SETTINGS;
  for (const [key, initial] of Object.entries(DEFAULT_SETTINGS)) {
    const given = value[key];
    const fits = initial === null ? given === null || Number.isFinite(given) : typeof given === typeof initial;
    if (fits && !PERMISSIONS.has(key)) settings[key] = given;
  }
  if (!["", "none", "low", "medium", "high"].includes(settings.reasoning as string)) settings.reasoning = "";
  if (!["auto", "required", "none"].includes(settings.toolChoice as string)) settings.toolChoice = "auto";
  return settings as unknown as Settings;
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function readJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    return error instanceof SyntaxError ? error : new SyntaxError(String(error));
  }
}
