import { useCallback } from "react";
import type { SequenceRow } from "../api/live";
import { formatCount } from "../lib/format";
import type { GroupPages } from "./liveState";
import { keyOf } from "./liveState";
import { drawPage, readPalette } from "./pageColours";
import styles from "./SequenceRows.module.css";
import { useCanvas } from "./useCanvas";

const HEIGHT = 12;
const MOST_ROWS = 64;

interface Props {
  sequences: ReadonlyMap<string, SequenceRow>;
  groups: readonly GroupPages[];
  version: unknown;
  onPoint: (key: string | null) => void;
}

/** The answers that run, each with its pages in the order of its text. */
export function SequenceRows({ sequences, groups, version, onPoint }: Props) {
  const rows = [...sequences.values()].sort((a, b) => a.request - b.request || a.index - b.index);
  return (
    <section className={styles.rows} aria-label="Running answers">
      <h2>
        Running answers <span>{rows.length}</span>
      </h2>
      {rows.length === 0 && (
        <p className={styles.none}>Nothing runs. Ask something in Chat, and its pages appear here.</p>
      )}
      {rows.length > 0 && (
        <ul onPointerLeave={() => onPoint(null)}>
          {rows.slice(0, MOST_ROWS).map((row) => (
            <li key={keyOf(row.request, row.index)} onPointerEnter={() => onPoint(keyOf(row.request, row.index))}>
              <span className={styles.name}>
                {row.request}.{row.index}
              </span>
              <span className={styles.facts}>{describe(row)}</span>
              <Pages row={row} groups={groups} version={version} />
            </li>
          ))}
        </ul>
      )}
      {rows.length > MOST_ROWS && <p className={styles.none}>and {rows.length - MOST_ROWS} more</p>}
    </section>
  );
}

function Pages({ row, groups, version }: { row: SequenceRow; groups: readonly GroupPages[]; version: unknown }) {
  const tables = row.tables.length || 1;
  // biome-ignore lint/correctness/useExhaustiveDependencies: the codes are changed in place; `version` tells when.
  const draw = useCallback(
    (context: CanvasRenderingContext2D, width: number) => {
      const palette = readPalette(context.canvas);
      row.tables.forEach((table, line) => {
        const codes = groups.find((group) => group.state.group === table.group)?.codes;
        const cell = Math.min(HEIGHT, width / Math.max(table.pages.length, 1));
        table.pages.forEach((page, place) => {
          if (page < 0) return;
          drawPage(
            context,
            palette,
            codes?.[page] ?? 0,
            place * cell,
            line * (HEIGHT + 2),
            Math.max(cell - 1, 0.5),
            HEIGHT,
          );
        });
      });
    },
    [row, groups, version],
  );
  return <canvas ref={useCanvas(tables * (HEIGHT + 2), draw)} className={styles.pages} />;
}

function describe(row: SequenceRow): string {
  const cached = row.cached_tokens > 0 ? `, ${formatCount(row.cached_tokens)} cached` : "";
  const now =
    row.phase === "prefill"
      ? `reads its prompt, ${formatCount(row.written_tokens)} of ${formatCount(row.prompt_tokens)}`
      : `${formatCount(row.tokens - row.prompt_tokens)} tokens after ${formatCount(row.prompt_tokens)}`;
  return now + cached;
}
