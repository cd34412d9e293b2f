import type { ChatBody } from "../api/chat";

export const LANGUAGES = { curl: "curl", python: "Python", javascript: "JavaScript" } as const;
export type Language = keyof typeof LANGUAGES;

/** A program that sends this request to the server at `origin`; the key is read from the environment. */
export function writeCode(language: Language, body: ChatBody, origin: string, needsKey: boolean): string {
  if (language === "curl") return writeCurl(body, origin, needsKey);
  return language === "python" ? writePython(body, origin, needsKey) : writeJavaScript(body, origin, needsKey);
}

function writeCurl(body: ChatBody, origin: string, needsKey: boolean): string {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $MLXR_API_KEY"' : "";
  const json = JSON.stringify(body, null, 2);
  const start = `curl ${origin}/v1/chat/completions \\\n  -H "Content-Type: application/json"${key} \\\n`;
  // A system bounds the arguments of a program, and pictures are longer.
  if (json.length > MOST_ARGUMENT) return `${start}  -d @- <<'END'\n${json}\nEND`;
  return `${start}  -d '${json.replaceAll("'", "'\\''")}'`;
}

const MOST_ARGUMENT = 60_000;

/** A program as it is shown, its pictures cut to their beginnings. */
export function cutPictures(code: string): string {
  return code.replace(/(data:\w+\/\w+;base64,[\w+/]{40})[\w+/=]+/g, "$1…");
}

/** Fields that OpenAI's client has no parameters for. */
const EXTRA = ["top_k", "min_p", "repetition_penalty"];

function writePython(body: ChatBody, origin: string, needsKey: boolean): string {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.includes(name)));
  const plain = Object.entries({ model: "default", ...body }).filter(([name]) => !EXTRA.includes(name));
  const rows = [...plain, ...(Object.keys(extra).length > 0 ? [["extra_body", extra] as const] : [])];
  const key = needsKey ? 'os.environ["MLXR_API_KEY"]' : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
    "reply = client.chat.completions.create(",
    ...rows.map(([name, value]) => `    ${name}=${toPython(value, "    ")},`),
    ")",
    "print(reply.choices[0].message.content)",
  ].join("\n");
}

function writeJavaScript(body: ChatBody, origin: string, needsKey: boolean): string {
  const key = needsKey ? `, Authorization: \`Bearer \${process.env.MLXR_API_KEY}\`` : "";
  return [
    `const response = await fetch("${origin}/v1/chat/completions", {`,
    '  method: "POST",',
    `  headers: { "Content-Type": "application/json"${key} },`,
    `  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`,
    "});",
    "const reply = await response.json();",
    "console.log(reply.choices[0].message.content);",
  ].join("\n");
}

/** A value of JSON as Python spells it. */
function toPython(value: unknown, indent: string): string {
  const deeper = `${indent}    `;
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const parts = Array.isArray(value)
    ? value.map((one) => toPython(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${toPython(one, deeper)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  return parts.length === 0
    ? open + close
    : `${open}\n${parts.map((part) => `${deeper}${part},`).join("\n")}\n${indent}${close}`;
}
