import { ArrowLeft, MessageSquare } from "lucide-react";
import { describeError } from "../api/client";
import { type ShownModel, shortName, useShownModel } from "../api/manage";
import { startChat } from "../chat/startChat";
import { formatCount, formatDay } from "../lib/format";
import { routeHref } from "../lib/route";
import { Button } from "../ui/Button";
import { Notice } from "../ui/Notice";
import { Skeleton } from "../ui/Skeleton";
import { FilteredTable } from "./FilteredTable";
import { MemoryNeed } from "./MemoryNeed";
import styles from "./ModelDetails.module.css";

/** All about one model: what it is, the memory it needs, its template, metadata and tensors. */
export default function ModelDetails({ name }: { name: string }) {
  const shown = useShownModel(name);
  return (
    <>
      <header className={styles.head}>
        <a className={styles.back} href={routeHref("models")}>
          <ArrowLeft aria-hidden="true" /> Models
        </a>
        <h1>{shortName(name)}</h1>
        <Button kind="primary" onClick={() => startChat(shortName(name))}>
          <MessageSquare aria-hidden="true" /> Chat with it
        </Button>
      </header>
      {shown.error && !shown.data && (
        <Notice kind="error">
          {shortName(name)} could not be read. {describeError(shown.error)}
        </Notice>
      )}
      {shown.isPending && <Skeleton bare />}
      {shown.data && <Parts name={name} model={shown.data} />}
    </>
  );
}

/** What a model can do, in the words of the field. */
const ABILITIES: Readonly<Record<string, string>> = {
  completion: "Text",
  tools: "Tools",
  thinking: "Thinking",
  insert: "Fill in the middle",
  embedding: "Embeddings",
  vision: "Images",
};

function Parts({ name, model }: { name: string; model: ShownModel }) {
  const facts = [
    ["Family", model.details.family],
    ["Parameters", model.details.parameter_size],
    ["Quantization", model.details.quantization_level],
    ["Format", model.details.format === "gguf" ? "GGUF" : model.details.format],
    ["Context length", `${formatCount(model.details.context_length)} tokens`],
    ["Embedding length", formatCount(model.details.embedding_length)],
    ["Capabilities", model.capabilities.map((name) => ABILITIES[name] ?? name).join(", ")],
    ["Changed", formatDay(model.modified_at)],
  ] as const;
  return (
    <>
      <dl className={styles.facts}>
        {facts.map(([term, text]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{text || "–"}</dd>
          </div>
        ))}
      </dl>
      <MemoryNeed name={name} contextTokens={model.details.context_length} />
      <Text title="System prompt" text={model.system} />
      <Text title="Parameters" text={model.parameters} />
      <Text title="Chat template" text={model.template} />
      <Text title="Licence" text={model.license} />
      <FilteredTable
        title="Metadata"
        columns={["Key", "Value"]}
        rows={Object.entries(model.model_info).map(([key, value]) => [key, describeValue(value)])}
      />
      <FilteredTable
        title="Tensors"
        columns={["Name", "Type", "Shape"]}
        rows={model.tensors.map((tensor) => [tensor.name, tensor.type, tensor.shape.map(formatCount).join(" × ")])}
      />
    </>
  );
}

function Text({ title, text }: { title: string; text: string | undefined }) {
  if (!text) return null;
  return (
    <details className={styles.text}>
      <summary>{title}</summary>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard. */}
      <section tabIndex={0} aria-label={title}>
        <pre>{text}</pre>
      </section>
    </details>
  );
}

function describeValue(value: unknown): string {
  if (value === null) return "a long list, not shown";
  if (Array.isArray(value)) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}
