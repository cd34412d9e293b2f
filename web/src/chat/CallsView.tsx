import { Globe, Play, Wrench } from "lucide-react";
import { useState } from "react";
import { describeError } from "../api/client";
import { useKept } from "../lib/kept";
import { Button } from "../ui/Button";
import { CodeBlock } from "../ui/CodeBlock";
import { Field } from "../ui/Field";
import { giveResults } from "./answering";
import { answerBuiltIn, readScript } from "./builtInTools";
import styles from "./CallsView.module.css";
import { changeSettings } from "./library";
import { callMcp, labelServer } from "./mcp";
import { runScript } from "./script";
import { askUrl } from "./tools";
import type { AssistantMessage, ToolCall, ToolServer } from "./types";
import { useConversation } from "./useThread";

/** The calls that an answer makes; `open` while their results are wanted. */
export function CallsView({ message, open }: { message: AssistantMessage; open: boolean }) {
  const calls = message.calls ?? [];
  const tools = useConversation(message.conversation)?.settings.tools ?? "";
  return (
    <div className={styles.calls}>
      {calls.map((call, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: calls never change places, and models repeat ids.
        <section key={index} className={styles.call} aria-label={`Call of ${call.name}`}>
          <h3>
            <Wrench aria-hidden="true" /> Calls <code>{call.name}</code>
          </h3>
          <CallCode call={call} tools={tools} />
        </section>
      ))}
      {open && <ResultsForm message={message} calls={calls} />}
    </div>
  );
}

function CallCode({ call, tools }: { call: ToolCall; tools: string }) {
  const script = readScript(call, tools);
  if (script !== null) return <CodeBlock code={script} language="javascript" />;
  return <CodeBlock code={indent(call.arguments)} language="json" />;
}

/** Takes a result for each call: typed in, or from the address that the person allowed. */
function ResultsForm({ message, calls }: { message: AssistantMessage; calls: readonly ToolCall[] }) {
  const tools = useConversation(message.conversation)?.settings.tools ?? "";
  const [results, setResults] = useKept<readonly string[]>(
    `results ${message.id}`,
    calls.map((call) => answerBuiltIn(call, tools) ?? ""),
  );
  const setResult = (index: number, text: string) =>
    setResults((before) => calls.map((_, at) => (at === index ? text : (before[at] ?? ""))));
  /** What an MCP server answered goes back to the model at once, if nothing else is missing. */
  const take = (index: number, text: string) => {
    const all = calls.map((_, at) => (at === index ? text : (results[at] ?? "")));
    setResult(index, text);
    if (all.every((one) => one.trim())) void giveResults(message, all);
  };
  const send = (event: React.FormEvent) => {
    event.preventDefault();
    void giveResults(message, results);
  };
  return (
    <form className={styles.form} onSubmit={send}>
      {calls.map((call, index) => (
        <ResultField
          // biome-ignore lint/suspicious/noArrayIndexKey: calls never change places, and models repeat ids.
          key={index}
          call={call}
          conversation={message.conversation}
          value={results[index] ?? ""}
          onChange={(text) => setResult(index, text)}
          onAnswer={(text) => take(index, text)}
        />
      ))}
      <div>
        <Button kind="primary" type="submit" disabled={calls.some((_, index) => !results[index]?.trim())}>
          {calls.length === 1 ? "Send the result" : "Send the results"}
        </Button>
      </div>
    </form>
  );
}

interface FieldProps {
  call: ToolCall;
  conversation: string;
  value: string;
  onChange: (text: string) => void;
  onAnswer: (text: string) => void;
}

function ResultField({ call, conversation, value, onChange, onAnswer }: FieldProps) {
  const settings = useConversation(conversation)?.settings;
  const script = readScript(call, settings?.tools ?? "");
  const server = script === null ? settings?.toolServers?.[call.name] : undefined;
  const url = server || script !== null ? undefined : settings?.toolUrls[call.name]?.url;
  const [asking, setAsking] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const ask = async (answer: () => Promise<void>) => {
    setAsking(true);
    setError(null);
    try {
      await answer();
    } catch (reason) {
      setError(describeError(reason));
    }
    setAsking(false);
  };
  const allow = (asked: ToolServer) => ({
    toolServers: { ...settings?.toolServers, [call.name]: { ...asked, allowed: true } },
  });
  const run = (always: boolean) => {
    if (always) changeSettings(conversation, server ? allow(server) : { runsScripts: true });
    if (server) void ask(async () => onAnswer(await callMcp(call, server)));
    else if (script !== null) void ask(async () => onAnswer(await runScript(script)));
  };
  return (
    <div className={styles.field}>
      <Field label={`Result of ${call.name}`} error={error}>
        {(ids) => <textarea {...ids} rows={3} value={value} onChange={(event) => onChange(event.target.value)} />}
      </Field>
      {(server || script !== null) && (
        <div className={styles.run}>
          <Button kind="primary" onClick={() => run(false)} disabled={asking}>
            <Play />{" "}
            {asking ? "Runs…" : server ? `Run once on ${labelServer(server.server)}` : "Run once in the sandbox"}
          </Button>
          <Button onClick={() => run(true)} disabled={asking}>
            Always run in this chat
          </Button>
          <Button onClick={() => onAnswer("The user declined this call.")} disabled={asking}>
            Decline
          </Button>
        </div>
      )}
      {url && (
        <div>
          <Button onClick={() => void ask(async () => onChange(await askUrl(call, url)))} disabled={asking}>
            <Globe /> {asking ? "Asks…" : `Ask ${url}`}
          </Button>
        </div>
      )}
    </div>
  );
}

/** The arguments in lines, if they are complete JSON. */
function indent(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
