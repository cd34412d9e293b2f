import { Globe, Wrench } from "lucide-react";
import { useState } from "react";
import { describeError } from "../api/client";
import { useKept } from "../lib/kept";
import { Button } from "../ui/Button";
import { CodeBlock } from "../ui/CodeBlock";
import { Field } from "../ui/Field";
import { giveResults } from "./answering";
import { answerBuiltIn } from "./builtInTools";
import styles from "./CallsView.module.css";
import { askUrl } from "./tools";
import type { AssistantMessage, ToolCall } from "./types";
import { useConversation } from "./useThread";

/** The calls that an answer makes; `open` while their results are wanted. */
export function CallsView({ message, open }: { message: AssistantMessage; open: boolean }) {
  const calls = message.calls ?? [];
  return (
    <div className={styles.calls}>
      {calls.map((call, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: calls never change places, and models repeat ids.
        <section key={index} className={styles.call} aria-label={`Call of ${call.name}`}>
          <h3>
            <Wrench aria-hidden="true" /> Calls <code>{call.name}</code>
          </h3>
          <CodeBlock code={indent(call.arguments)} language="json" />
        </section>
      ))}
      {open && <ResultsForm message={message} calls={calls} />}
    </div>
  );
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
}

function ResultField({ call, conversation, value, onChange }: FieldProps) {
  const url = useConversation(conversation)?.settings.toolUrls[call.name]?.url;
  const [asking, setAsking] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const ask = async (address: string) => {
    setAsking(true);
    setError(null);
    try {
      onChange(await askUrl(call, address));
    } catch (reason) {
      setError(describeError(reason));
    }
    setAsking(false);
  };
  return (
    <div className={styles.field}>
      <Field label={`Result of ${call.name}`} error={error}>
        {(ids) => <textarea {...ids} rows={3} value={value} onChange={(event) => onChange(event.target.value)} />}
      </Field>
      {url && (
        <div>
          <Button onClick={() => void ask(url)} disabled={asking}>
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
