import { Activity, Pause, Play } from "lucide-react";
import { useMemo, useState } from "react";
import { formatBytes, formatCount } from "../lib/format";
import { Button } from "../ui/Button";
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
  const figures: [string, string][] = [
    ["Decode", `${formatCount((recent?.decodeTokens ?? 0) / Math.max(recent?.stepSeconds ?? 1, 0.001))} tokens/s`],
    ["Running", `${queue.running}${queue.waiting ? `, ${queue.waiting} wait` : ""}`],
    ["Prompt from cache", looked ? `${Math.round((100 * found) / looked)} %` : "–"],
    ["Tokens from disk", formatCount(counters.disk_hit_tokens)],
    ["Preemptions", formatCount(counters.preemptions)],
    ["Evicted pages", formatCount(counters.evicted_pages)],
    ["On disk", store ? formatBytes(store.bytes) : "no store"],
    ["Device", `${model?.device ?? ""} ${model?.isa ?? ""}, ${model?.threads ?? 0} threads`],
  ];
  return (
    <dl className={styles.figuresRow}>
      {figures.map(([term, text]) => (
        <div key={term}>
          <dt>{term}</dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}
