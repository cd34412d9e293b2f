import { useState } from "react";
import type { LogEntry } from "../api/live";
import { formatCount } from "../lib/format";
import { SelectField } from "../ui/SelectField";
import styles from "./EngineView.module.css";

const KINDS = {
  all: "All events",
  started: "Started",
  ended: "Ended",
  preempted: "Preempted",
  refused: "Refused",
  evicted: "Evicted",
  dropped: "Dropped",
  failed: "Failed",
} as const;

/** What happened, the newest first, with the reason. */
export function EventLog({ log, leftOut }: { log: readonly LogEntry[]; leftOut: number }) {
  const [kind, setKind] = useState<keyof typeof KINDS>("all");
  const shown = log.filter((entry) => kind === "all" || entry.kind === kind);
  return (
    <section className={styles.panel} aria-label="Events">
      <div className={styles.panelHead}>
        <h2>Events</h2>
        <div className={styles.kinds}>
          <SelectField label="Show" value={kind} choices={KINDS} onChange={setKind} />
        </div>
      </div>
      {shown.length === 0 && <p className={styles.small}>Nothing yet.</p>}
      {shown.length > 0 && (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard.
        <section className={styles.scroll} tabIndex={0} aria-label="List of events">
          <ol className={styles.log}>
            {shown.map((entry, index) => (
              // biome-ignore lint/suspicious/noArrayIndexKey: entries have no other name than their place.
              <li key={index} data-kind={entry.kind}>
                <time>{new Date(entry.time * 1000).toLocaleTimeString("en-GB")}</time>
                <strong>{entry.kind}</strong>
                <span>{describe(entry)}</span>
              </li>
            ))}
          </ol>
        </section>
      )}
      {leftOut > 0 && <p className={styles.small}>{formatCount(leftOut)} more were too many to send.</p>}
    </section>
  );
}

function describe(entry: LogEntry): string {
  const who = entry.request === null ? "" : `answer ${entry.request}${entry.index === null ? "" : `.${entry.index}`}: `;
  const pages = entry.kind === "evicted" || entry.kind === "dropped" ? " pages" : "";
  return `${who}${entry.reason.replaceAll("_", " ")}${entry.text ? ` (${entry.text}${pages})` : ""}`;
}
