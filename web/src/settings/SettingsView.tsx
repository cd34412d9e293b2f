import { useQuery } from "@tanstack/react-query";
import { Download, Keyboard, Trash2 } from "lucide-react";
import { type ReactNode, useEffect, useId } from "react";
import { describeError } from "../api/client";
import { apiKey, forgetKey, keyWanted } from "../api/key";
import { type ServerInfo, useServerInfo } from "../api/manage";
import { nameModel } from "../api/models";
import { conversations, openLibrary, readWholes, removeConversations } from "../chat/library";
import { type Titles, titles } from "../chat/titles";
import { exportJson } from "../chat/transfer";
import { runCommand } from "../lib/commands";
import { formatBytes, formatCount, formatSeconds } from "../lib/format";
import { saveFile } from "../lib/save";
import { useStore } from "../lib/store";
import { type TextSize, type Theme, textSize, theme } from "../lib/theme";
import { Button } from "../ui/Button";
import { Notice } from "../ui/Notice";
import { SelectField } from "../ui/SelectField";
import styles from "./SettingsView.module.css";

const THEMES: Record<Theme, string> = { system: "System", light: "Light", dark: "Dark" };
const SIZES: Record<TextSize, string> = { normal: "Normal", large: "Large", larger: "Larger" };
const TITLES: Record<Titles, string> = { model: "Written by the model", words: "The first words of the message" };

/** What this browser keeps and shows, and what the server is. */
export default function SettingsView(_: { detail: string }) {
  return (
    <div className={styles.settings}>
      <h1>Settings</h1>
      <Section title="Appearance">
        <div className={styles.fields}>
          <SelectField label="Theme" choices={THEMES} value={useStore(theme)} onChange={theme.set} />
          <SelectField label="Text size" choices={SIZES} value={useStore(textSize)} onChange={textSize.set} />
        </div>
      </Section>
      <Section title="Keyboard">
        <div>
          <Button onClick={() => runCommand("help")}>
            <Keyboard aria-hidden="true" /> Keyboard shortcuts
          </Button>
        </div>
      </Section>
      <Section title="API key">
        <Key />
      </Section>
      <Section title="Conversations">
        <Data />
      </Section>
      <Section title="Server">
        <Server />
      </Section>
    </div>
  );
}

function Section({ title, children }: { title: string; children: ReactNode }) {
  const heading = useId();
  return (
    <section className={styles.section} aria-labelledby={heading}>
      <h2 id={heading}>{title}</h2>
      {children}
    </section>
  );
}

function Key() {
  const key = useStore(apiKey);
  return (
    <>
      <p>
        {key
          ? "This browser sends a key with each request."
          : "No key is used. A server that was started with keys asks for one."}
      </p>
      <div>
        {key ? (
          <Button onClick={forgetKey}>Forget the key</Button>
        ) : (
          <Button onClick={() => keyWanted.set("offered")}>Enter a key</Button>
        )}
      </div>
    </>
  );
}

/** The conversations of this browser: how many, how much room they take, all of them as a file, and none of them. */
function Data() {
  const all = useStore(conversations);
  useEffect(() => {
    if (conversations.get() === null) void openLibrary();
  }, []);
  const used = useQuery({
    queryKey: ["storage", all?.length],
    queryFn: async () => (await navigator.storage?.estimate())?.usage ?? null,
  }).data;
  const chosen = all ?? [];
  const exportAll = async () =>
    saveFile("conversations.json", exportJson(await readWholes(chosen)), "application/json");
  return (
    <>
      <p>
        {formatCount(chosen.length)} {chosen.length === 1 ? "conversation is" : "conversations are"} kept in this
        browser alone{used ? `, in ${formatBytes(used)} of its storage` : ""}. The server keeps none.
      </p>
      <div className={styles.buttons}>
        <Button onClick={() => void exportAll()} disabled={chosen.length === 0}>
          <Download aria-hidden="true" /> Export all conversations
        </Button>
        <Button
          kind="danger"
          onClick={() => void removeConversations(chosen.map((one) => one.id))}
          disabled={chosen.length === 0}
        >
          <Trash2 aria-hidden="true" /> Delete all conversations
        </Button>
      </div>
      <div className={styles.fields}>
        <SelectField
          label="Titles"
          hint="Of conversations whose first message is longer than a title. The demo writes none."
          choices={TITLES}
          value={useStore(titles)}
          onChange={titles.set}
        />
      </div>
    </>
  );
}

function Server() {
  const { data, error } = useServerInfo();
  if (error) return <Notice kind="warning">What the server is could not be read. {describeError(error)}</Notice>;
  if (!data) return null;
  return (
    <>
      <dl className={styles.facts}>
        {describe(data).map(([term, text]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <p className={styles.note}>
        These are set where the server is started: <code>mlxr settings</code> shows them with their origin. Its routes
        are described in <a href="./openapi.json">openapi.json</a>; <a href="./docs">docs</a> tries them. The page
        contains the work of others, under <a href="./licenses.txt">their licences</a>.
      </p>
    </>
  );
}

function describe(info: ServerInfo): [string, string][] {
  return [
    ["Version", `mlxr ${info.version}`],
    ["Device", info.device],
    ["Default model", nameModel(info.default_model)],
    [
      "Context length",
      info.context_tokens === null ? "that of each model" : `${formatCount(info.context_tokens)} tokens`,
    ],
    ["Answers at once", `${formatCount(info.max_sequences)}, and ${formatCount(info.max_waiting)} may wait`],
    ["Memory for models", formatBytes(info.models_memory_bytes)],
    ["Cache on disk", info.store_bytes > 0 ? `up to ${formatBytes(info.store_bytes)}` : "none"],
    ["Unloads idle models", info.keep_alive_s < 0 ? "never" : `after ${formatSeconds(info.keep_alive_s)}`],
    ["Largest request", formatBytes(info.max_body_bytes)],
    ["Keys", info.needs_key ? "needed" : "not needed"],
    ["Pulls from", info.hub_url],
    ["Imports from", info.import_folders.join(", ") || "nowhere"],
    ["Tools may call", info.tool_origins.join(", ") || "this server alone"],
  ];
}
