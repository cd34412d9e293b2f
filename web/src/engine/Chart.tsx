import { useEffect, useRef } from "react";
import uPlot from "uplot";
import { Help } from "../ui/Help";
import "uplot/dist/uPlot.min.css";
import styles from "./Chart.module.css";
import { useThemeName, useWidth } from "./useCanvas";

interface Line {
  label: string;
  /** A name of a colour in tokens.css. */
  colour: string;
  isFilled?: boolean;
}

interface Props {
  title: string;
  /** The newest values in words, for those who cannot see the lines. */
  summary: string;
  /** What it shows, for those who have not seen an engine before. */
  meaning: string;
  lines: readonly Line[];
  /** Times in seconds since 1970, then the values of each line. */
  data: uPlot.AlignedData;
}

const HEIGHT = 150;
const SPAN_S = 60;

const MARKS_S = [60, 45, 30, 15, 0];

/** Where the marks below a chart stand: counted back from the newest moment. */
function markTimes(plot: uPlot): number[] {
  return MARKS_S.map((seconds) => (plot.scales.x?.max ?? 0) - seconds);
}

function describeMark(_: number, index: number): string {
  return MARKS_S[index] === 0 ? "now" : `−${MARKS_S[index]} s`;
}

/** Lines over the last minute. */
export function Chart({ title, summary, meaning, lines, data }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const width = useWidth(box);
  const theme = useThemeName();
  const key = lines.map((line) => line.label).join();
  // biome-ignore lint/correctness/useExhaustiveDependencies: made anew for another theme or other lines; data is set below.
  useEffect(() => {
    const element = box.current;
    if (!element || width === 0) return;
    const style = getComputedStyle(element);
    const read = (name: string) => style.getPropertyValue(name).trim();
    const axis = { stroke: read("--text-faint"), grid: { stroke: read("--line"), width: 1 }, ticks: { show: false } };
    const made = new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        scales: {
          x: { range: (_, __, last) => [last - SPAN_S, last] },
          y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1)] },
        },
        axes: [
          { ...axis, size: 24, splits: markTimes, values: (_, marks) => marks.map(describeMark) },
          { ...axis, size: 48 },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.label,
            stroke: read(line.colour),
            width: 1.5,
            points: { show: false },
            ...(line.isFilled ? { fill: `color-mix(in srgb, ${read(line.colour)} 18%, transparent)` } : {}),
          })),
        ],
      },
      data,
      element,
    );
    plot.current = made;
    return () => {
      plot.current = null;
      made.destroy();
    };
  }, [width, theme, key]);
  useEffect(() => plot.current?.setData(data), [data]);
  return (
    <figure className={styles.chart}>
      <figcaption>
        <h2>
          {title} <Help about={title}>{meaning}</Help>
        </h2>
        <ul>
          {lines.map((line) => (
            <li key={line.label}>
              <span style={{ background: `var(${line.colour})` }} aria-hidden="true" />
              {line.label}
            </li>
          ))}
        </ul>
      </figcaption>
      <div ref={box} className={styles.plot} role="img" aria-label={`${title}: ${summary}`} />
    </figure>
  );
}
