import { Activity, Pause, Play } from "lucide-react";
import { useMemo, useState } from "react";
import { formatBytes, formatCount } from "../lib/format";
import { Button } from "../ui/Button";
import { Help } from "../ui/Help";
import { Empty, Notice } from "../ui/Notice";
import { Charts } from "./Charts";
import styles from "./EngineView.module.css";
import { EventLog } from "./EventLog";
import { Kernels } from "./Kernels";
import { type Live, sumRecent } from "./liveState";
import { PageMap } from "./PageMap";
import { Roofline } from "./Roofline";
import { SequenceRows } from "./SequenceRows";
import { useLive, type Watching } from "./useLive";

const STATES: Record<Watching["state"], string> = {
  connecting: "Connecting…",
  live: "Live",
  paused: "Paused",
  lost: "Lost; trying again",
};

/** What an engine does at this moment. */
export default function EngineView(_: { detail: string }) {
  const [model, setModel] = useState("");
  const [isPaused, setPaused] = useState(false);
  const { live, state, problem } = useLive(model, isPaused);
  const models = [...new Set([...(live?.models ?? []), ...(model ? [model] : [])])];
  return (
    <div className={styles.view}>
      <header className={styles.head}>
        <h1>Engine</h1>
        <select aria-label="Model to watch" value={model} onChange={(event) => setModel(event.target.value)}>
          <option value="">The model used last</option>
          {models.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
        <span className={styles.state} data-state={state} role="status">
          {STATES[state]}
        </span>
        <Button small onClick={() => setPaused(!isPaused)}>
          {isPaused ? <Play aria-hidden="true" /> : <Pause aria-hidden="true" />}
          {isPaused ? "Go on" : "Pause"}
        </Button>
      </header>
      <p className={styles.lead}>
        The engine reads questions and writes answers token by token. What it has read it remembers in pages of memory,
        so the next question of a conversation begins where the last one ended. Here you see that memory and the work as
        they happen.
      </p>
      {problem && <Notice kind="warning">{problem}</Notice>}
      {live?.model && <Watched live={live} />}
      {live && !live.model && (
        <Empty title="No model is loaded" icon={<Activity aria-hidden="true" />}>
          <p>
            Ask something in Chat or load a model under Models. This view then shows its pages and steps as they happen.
          </p>
        </Empty>
      )}
    </div>
  );
}

function Watched({ live }: { live: Live }) {
  const [pointed, setPointed] = useState<string | null>(null);
  const tables = pointed === null ? undefined : live.sequences.get(pointed)?.tables;
  const marks = useMemo(() => new Map(tables?.map((table) => [table.group, new Set(table.pages)]) ?? []), [tables]);
  return (
    <>
      <Figures live={live} />
      <div className={styles.panel}>
        {live.groups.map((group) => (
          <PageMap
            key={group.state.group}
            group={group}
            model={live.model?.name ?? ""}
            marked={marks.get(group.state.group) ?? NONE}
            version={live}
          />
        ))}
        <SequenceRows sequences={live.sequences} groups={live.groups} version={live} onPoint={setPointed} />
      </div>
      <Charts history={live.history} />
      <div className={styles.columns}>
        <div className={styles.column}>
          <Roofline live={live} />
          <EventLog log={live.log} leftOut={live.logLeftOut} />
        </div>
        <Kernels kernels={live.kernels} />
      </div>
    </>
  );
}

const NONE: ReadonlySet<number> = new Set();

function Figures({ live }: { live: Live }) {
  const { counters, queue, model, store } = live;
  const recent = sumRecent(live.history.slice(-20), 1);
  const found = counters.memory_hit_tokens + counters.disk_hit_tokens + counters.peer_hit_tokens;
  const looked = found + counters.missed_tokens;
  const figures: [string, string, string][] = [
    [
      "Decode",
      `${formatCount((recent?.decodeTokens ?? 0) / Math.max(recent?.stepSeconds ?? 1, 0.001))} tokens/s`,
      "How fast answers are written now, all answers together. A token is about four letters of English.",
    ],
    [
      "Running",
      `${queue.running}${queue.waiting ? `, ${queue.waiting} wait` : ""}`,
      "Answers that are being written at this moment, and questions that wait for their turn.",
    ],
    [
      "Prompt from cache",
      looked ? `${Math.round((100 * found) / looked)} %` : "–",
      "How much of all prompts was still in memory and was not computed again. The more, the sooner answers begin.",
    ],
    [
      "Tokens from disk",
      formatCount(counters.disk_hit_tokens),
      "Tokens of prompts that came back from the disk instead of being computed again.",
    ],
    [
      "Preemptions",
      formatCount(counters.preemptions),
      "Answers that were paused as the memory of conversations was full. They go on by themselves; many of them mean that the cache is small.",
    ],
    [
      "Evicted pages",
      formatCount(counters.evicted_pages),
      "Pages of old conversations that were forgotten to make room. Whoever goes on with such a conversation waits a little longer.",
    ],
    [
      "On disk",
      store ? formatBytes(store.bytes) : "no store",
      "Memory of conversations that is kept on the disk, also while the server is off.",
    ],
    [
      "Device",
      `${model?.device ?? ""} ${model?.isa ?? ""}, ${model?.threads ?? 0} threads`,
      "What computes: the processor with its fastest instructions, or a graphics card.",
    ],
  ];
  return (
    <dl className={styles.figuresRow}>
      {figures.map(([term, text, meaning]) => (
        <div key={term}>
          <dt>
            {term} <Help about={term}>{meaning}</Help>
          </dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}
