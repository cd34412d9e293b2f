import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { formatBytes, formatCount } from "../lib/format";
import { countPages, type GroupPages } from "./liveState";
import styles from "./PageMap.module.css";
import { PageNote } from "./PageNote";
import { drawPage, drawPages, KINDS, readPalette } from "./pageColours";
import { useCanvas, useWidth } from "./useCanvas";

const MOST_HEIGHT = 320;
const LARGEST_CELL = 16;
const SMALLEST_CELL = 6;
const FLASH_MS = 900;

interface Props {
  group: GroupPages;
  model: string;
  /** Pages of the answer that is pointed at. */
  marked: ReadonlySet<number>;
  /** Changes with every event, as the pages themselves are changed in place. */
  version: unknown;
}

/** Every page of a group as a cell; the one under the pointer or the cursor is described below. */
export function PageMap({ group, model, marked, version }: Props) {
  const box = useRef<HTMLElement>(null);
  const width = useWidth(box);
  const [chosen, setChosen] = useState<number | null>(null);
  const layout = useMemo(() => arrange(group.state.pages, width), [group.state.pages, width]);
  const now = useFlashClock(group, version);
  // biome-ignore lint/correctness/useExhaustiveDependencies: the pages are changed in place; `version` tells when.
  const draw = useCallback(
    (context: CanvasRenderingContext2D) => {
      const palette = readPalette(context.canvas);
      const { cell, columns, per } = layout;
      const gap = cell >= 5 ? 1 : 0;
      for (let square = 0; square * per < group.codes.length; square++) {
        const page = square * per;
        const x = (square % columns) * cell;
        const y = Math.floor(square / columns) * cell;
        if (per === 1) drawPage(context, palette, group.codes[page] ?? 0, x, y, cell - gap, cell - gap);
        else drawPages(context, palette, group.codes.subarray(page, page + per), x, y, cell - gap);
        const pages = Array.from({ length: per }, (_, at) => page + at);
        const flash = group.flashes.size > 0 ? pages.map((one) => group.flashes.get(one)).find(Boolean) : undefined;
        const age = flash ? (now - flash.at) / FLASH_MS : 1;
        if (flash && age < 1) {
          context.globalAlpha = 1 - Math.max(age, 0);
          context.fillStyle = flash.kind === "evicted" ? palette.evicted : palette.copied;
          context.fillRect(x, y, cell - gap, cell - gap);
          context.globalAlpha = 1;
        }
        if (page === chosen || (marked.size > 0 && pages.some((one) => marked.has(one)))) {
          context.strokeStyle = palette.ink;
          context.lineWidth = page === chosen ? 2 : 1;
          context.strokeRect(x + 0.5, y + 0.5, cell - gap - 1, cell - gap - 1);
        }
      }
    },
    [group, version, layout, chosen, marked, now],
  );
  const canvas = useCanvas(layout.height, draw);
  const find = (event: React.PointerEvent) => {
    const place = canvas.current?.getBoundingClientRect();
    if (!place) return;
    const column = Math.floor((event.clientX - place.left) / layout.cell);
    const page = layout.per * (Math.floor((event.clientY - place.top) / layout.cell) * layout.columns + column);
    setChosen(column < layout.columns && page >= 0 && page < group.state.pages ? page : null);
  };
  const move = (event: React.KeyboardEvent) => {
    const steps: Record<string, number> = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: layout.columns,
      ArrowUp: -layout.columns,
    };
    const step = steps[event.key];
    if (step === undefined) {
      if (event.key === "Escape") setChosen(null);
      return;
    }
    event.preventDefault();
    const next = chosen === null ? 0 : chosen + step * layout.per;
    if (next >= 0 && next < group.state.pages) setChosen(next);
  };
  const counts = countPages(group.codes);
  const { state } = group;
  const ofStates = state.holds === "states";
  return (
    <section className={styles.map} aria-label={`${ofStates ? "States" : "Pages"} of ${state.name}`}>
      <header className={styles.head}>
        <h2>{ofStates ? "States" : "Pages"}</h2>
        <p>
          {ofStates
            ? `${formatCount(state.pages)} slots of ${formatBytes(state.page_bytes)}. Cached ones are snapshots, from which an answer can go on`
            : `Memory of conversations: ${formatCount(state.pages)} pages, each for ${state.page_size} tokens in ${formatBytes(state.page_bytes)}`}
          {layout.per > 1 && `. Each square is ${layout.per} pages`}. {state.layers} layers ({state.name})
        </p>
      </header>
      {state.short_tokens > 0 && (
        <p className={styles.note}>
          {formatCount(state.short_tokens)} tokens of prompts were computed again, though other groups had them: there
          was no {ofStates ? "snapshot" : "page"} here where those had their pages.
        </p>
      )}
      <ul className={styles.legend}>
        {KINDS.map(([kind, label, colour]) => (
          <li key={kind}>
            <span className={styles.swatch} style={{ background: `var(${colour})` }} aria-hidden="true" />
            {label} <strong>{formatCount(counts[kind])}</strong>
          </li>
        ))}
      </ul>
      <section
        ref={box}
        className={styles.cells}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: arrow keys move over the pages.
        tabIndex={0}
        aria-label="Map of pages; arrow keys choose one"
        onKeyDown={move}
        onPointerMove={find}
        onPointerLeave={() => setChosen(null)}
      >
        <canvas ref={canvas} />
      </section>
      <PageNote model={model} group={group} page={chosen} />
    </section>
  );
}

/** How large cells are so that all pages fit, and how many stand in a row. */
export function arrange(pages: number, width: number): Layout {
  if (width === 0 || pages === 0) return { cell: 1, columns: 1, height: 1, per: 1 };
  for (let per = 1; ; per *= 2)
    for (let cell = LARGEST_CELL; cell >= SMALLEST_CELL; cell--) {
      const columns = Math.max(1, Math.floor(width / cell));
      const height = Math.ceil(pages / per / columns) * cell;
      if (height <= MOST_HEIGHT) return { cell, columns, height, per };
    }
}

interface Layout {
  cell: number;
  columns: number;
  height: number;
  /** Pages that one square stands for. */
  per: number;
}

/** A clock that runs while pages flash, and stands still otherwise. */
function useFlashClock(group: GroupPages, version: unknown): number {
  const [now, setNow] = useState(0);
  // biome-ignore lint/correctness/useExhaustiveDependencies: every event may have brought new flashes.
  useEffect(() => {
    if (group.flashes.size === 0) return;
    let frame = 0;
    const tick = () => {
      const at = performance.now();
      for (const [page, flash] of group.flashes) if (at - flash.at > FLASH_MS) group.flashes.delete(page);
      setNow(at);
      if (group.flashes.size > 0) frame = requestAnimationFrame(tick);
    };
    frame = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(frame);
  }, [group, version]);
  return now;
}
