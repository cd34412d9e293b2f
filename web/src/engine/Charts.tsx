import { useMemo } from "react";
import { formatCount } from "../lib/format";
import { Chart } from "./Chart";
import styles from "./EngineView.module.css";
import type { Moment } from "./liveState";

/** Tokens a second, the length of a step, and the queue, over the last minute. */
export function Charts({ history }: { history: readonly Moment[] }) {
  const data = useMemo(() => {
    const times = history.map((moment) => moment.time);
    const per = (of: (moment: Moment) => number) =>
      history.map((moment) => of(moment) / Math.max(moment.seconds, 0.05));
    return {
      tokens: [times, per((moment) => moment.decodeTokens), per((moment) => moment.prefillTokens)] as [
        number[],
        number[],
        number[],
      ],
      steps: [times, history.map((moment) => (moment.steps ? (1000 * moment.stepSeconds) / moment.steps : null))] as [
        number[],
        (number | null)[],
      ],
      queue: [times, history.map((moment) => moment.running), history.map((moment) => moment.waiting)] as [
        number[],
        number[],
        number[],
      ],
    };
  }, [history]);
  const last = history.at(-1);
  return (
    <div className={styles.charts}>
      <Chart
        title="Tokens per second"
        meaning="Decode is the writing of answers, prefill the reading of questions. Reading goes many tokens at a time, so it is much faster."
        summary={`${formatCount(data.tokens[1].at(-1) ?? 0)} decoded, ${formatCount(data.tokens[2].at(-1) ?? 0)} of prompts`}
        lines={[
          { label: "decode", colour: "--page-private", isFilled: true },
          { label: "prefill", colour: "--page-waiting" },
        ]}
        data={data.tokens}
      />
      <Chart
        title="Milliseconds per step"
        meaning="In a step the model runs once, for all answers at once: each gets its next token, and questions are read on."
        summary={`${data.steps[1].at(-1)?.toFixed(1) ?? "none"} now`}
        lines={[{ label: "step", colour: "--page-shared", isFilled: true }]}
        data={data.steps}
      />
      <Chart
        title="Answers"
        meaning="How many answers are being written together, and how many questions wait."
        summary={`${last?.running ?? 0} running, ${last?.waiting ?? 0} waiting`}
        lines={[
          { label: "running", colour: "--page-shared", isFilled: true },
          { label: "waiting", colour: "--danger" },
        ]}
        data={data.queue}
      />
    </div>
  );
}
