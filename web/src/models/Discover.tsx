import { useQueryClient } from "@tanstack/react-query";
import { Compass, Download } from "lucide-react";
import { useId, useState } from "react";
import { describeError } from "../api/client";
import { type KnownModel, refreshModels, useKnownModels } from "../api/manage";
import { formatBytes } from "../lib/format";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { CheckField } from "../ui/Field";
import { Notice } from "../ui/Notice";
import { Skeleton } from "../ui/Skeleton";
import styles from "./Discover.module.css";
import { pulls, startPull } from "./pulls";

const FITS: Record<KnownModel["fits"], string> = {
  yes: "Fits",
  tight: "Fits barely",
  no: "Too large for the free memory",
  unknown: "",
};

/** Well-known models by their short names, with their size and whether they fit; one click pulls one. */
export function Discover({ isFirst }: { isFirst: boolean }) {
  const [wanted, setOpen] = useState<boolean | null>(null);
  const open = wanted ?? isFirst;
  const list = useId();
  const { data, error, isPending } = useKnownModels(open);
  return (
    <section className={styles.discover} aria-label="Discover models">
      <Button aria-expanded={open} aria-controls={list} onClick={() => setOpen(!open)}>
        <Compass aria-hidden="true" /> Discover models
      </Button>
      <div id={list} hidden={!open}>
        {open && isPending && <Skeleton bare />}
        {error && <Notice kind="error">The well-known models could not be read. {describeError(error)}</Notice>}
        {open && data && <List models={data} />}
      </div>
    </section>
  );
}

function List({ models }: { models: readonly KnownModel[] }) {
  const [words, setWords] = useState("");
  const [fitting, setFitting] = useState(true);
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter((model) => {
    const text = `${model.name} ${model.about} ${model.repository}`.toLowerCase();
    return parts.every((part) => text.includes(part)) && !(fitting && model.fits === "no");
  });
  return (
    <div className={styles.inside}>
      <div className={styles.filters}>
        <input
          type="search"
          aria-label="Search the well-known models"
          placeholder="Name or use, such as code"
          value={words}
          onChange={(event) => setWords(event.target.value)}
        />
        <CheckField label="Only those that fit" checked={fitting} onChange={setFitting} />
      </div>
      {found.length === 0 && <p className={styles.none}>None of {models.length} models is like that.</p>}
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard. */}
      <section className={styles.scroll} tabIndex={0} aria-label="Well-known models">
        <ul>
          {found.map((model) => (
            <Row key={model.name} model={model} />
          ))}
        </ul>
      </section>
    </div>
  );
}

function Row({ model }: { model: KnownModel }) {
  const queries = useQueryClient();
  const isPulling = useStore(pulls).some((pull) => pull.model === model.name && pull.state === "running");
  return (
    <li className={styles.row}>
      <div>
        <strong>{model.name}</strong>
        <p>{model.about}</p>
      </div>
      <span className={styles.size}>{formatBytes(model.size_bytes)}</span>
      <span className={styles.fits} data-fits={model.fits}>
        {FITS[model.fits]}
      </span>
      <Button
        small
        aria-label={`Pull ${model.name}`}
        disabled={isPulling}
        onClick={() => void startPull(model.name, () => void refreshModels(queries))}
      >
        <Download aria-hidden="true" /> {isPulling ? "Pulling…" : "Pull"}
      </Button>
    </li>
  );
}
