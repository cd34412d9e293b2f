import { useEffect, useRef, useState } from "react";
import { formatCount, formatRate, formatSeconds } from "../lib/format";
import { Markdown } from "../ui/Markdown";
import { Notice } from "../ui/Notice";
import { type Asked, ask } from "./ask";
import styles from "./CompareView.module.css";
import { OptionsForm } from "./OptionsForm";
import { DEFAULTS, type Options, writeBody } from "./options";
import { Prompt } from "./Prompt";

const SIDES = ["Left", "Right"] as const;

/** One question, two answers next to each other. */
export function SideBySide() {
  const [options, setOptions] = useState<readonly Options[]>([{ ...DEFAULTS, temperature: 0 }, DEFAULTS]);
  const [answers, setAnswers] = useState<readonly (Asked | null)[]>([null, null]);
  const stop = useRef<AbortController | null>(null);
  const [isRunning, setRunning] = useState(false);
  useEffect(() => () => stop.current?.abort(), []);
  const run = async (prompt: string) => {
    const control = new AbortController();
    stop.current = control;
    setRunning(true);
    setAnswers([null, null]);
    await Promise.all(
      options.map((one, side) =>
        ask(writeBody(prompt, one), control.signal, (asked) => setAnswers((all) => put(all, side, asked))),
      ),
    );
    setRunning(false);
  };
  return (
    <>
      <Prompt
        label="One question for both"
        verb="Ask both"
        isRunning={isRunning}
        onAsk={(prompt) => void run(prompt)}
        onStop={() => stop.current?.abort()}
      />
      <div className={styles.sides}>
        {SIDES.map((name, side) => (
          <section key={name} className={styles.side} aria-label={name}>
            <OptionsForm
              options={options[side] ?? DEFAULTS}
              onChange={(changed) => setOptions((all) => put(all, side, changed))}
            />
            <Answer asked={answers[side] ?? null} />
          </section>
        ))}
      </div>
    </>
  );
}

function Answer({ asked }: { asked: Asked | null }) {
  if (asked === null) return <p className={styles.note}>The answer appears here.</p>;
  return (
    <>
      <div className={styles.answer}>
        <Markdown text={asked.text} growing={asked.state === "growing"} />
      </div>
      {asked.error !== null && <Notice kind="error">{asked.error}</Notice>}
      <p className={styles.note}>{describe(asked)}</p>
    </>
  );
}

function describe(asked: Asked): string {
  const parts = [`${formatCount(asked.tokens)} tokens`];
  if (asked.firstS !== null) parts.push(`first after ${formatSeconds(asked.firstS)}`);
  if (asked.tokensPerS !== null) parts.push(formatRate(asked.tokensPerS));
  if (asked.cachedTokens > 0) parts.push(`${formatCount(asked.cachedTokens)} of the prompt from the cache`);
  if (asked.state === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function put<T>(all: readonly T[], index: number, value: T): T[] {
  return all.map((one, at) => (at === index ? value : one));
}
