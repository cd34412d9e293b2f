import { useQueryClient } from "@tanstack/react-query";
import { Compass, Download, Search } from "lucide-react";
import { type ReactNode, useId, useState } from "react";
import { describeError } from "../api/client";
import { type KnownModel, refreshModels, useHubSearch, useKnownModels } from "../api/manage";
import { formatBytes, formatCount, formatRate } from "../lib/format";
import { routeHref } from "../lib/route";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { CheckField } from "../ui/Field";
import { Notice } from "../ui/Notice";
import { Skeleton } from "../ui/Skeleton";
import styles from "./Discover.module.css";
import { pulls, startPull } from "./pulls";

const FITS: Record<KnownModel["fits"], string> = {
  yes: "Fits",
  slow: "Fits, but slow",
  tight: "Fits barely",
  no: "Too large for the free memory",
  unknown: "",
};

/** Well-known models by their short names, with size, speed and whether they fit, and what the hub has; one click pulls one. */
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
  const [asked, setAsked] = useState("");
  const [fitting, setFitting] = useState(true);
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter((model) => {
    const text = `${model.name} ${model.about} ${model.repository}`.toLowerCase();
    return parts.every((part) => text.includes(part)) && !(fitting && model.fits === "no");
  });
  return (
    <div className={styles.inside}>
      <form
        className={styles.filters}
        onSubmit={(event) => {
          event.preventDefault();
          setAsked(words.trim());
        }}
      >
        <input
          type="search"
          aria-label="Search the well-known models"
          placeholder="Name or use, such as code"
          value={words}
          onChange={(event) => setWords(event.target.value)}
        />
        <Button small type="submit" disabled={words.trim() === ""}>
          <Search aria-hidden="true" /> Search Hugging Face, too
        </Button>
        <CheckField label="Only those that fit" checked={fitting} onChange={setFitting} />
      </form>
      {found.length === 0 && <p className={styles.none}>None of {models.length} well-known models is like that.</p>}
      {found.length > 0 && (
        <Rows label="Well-known models">
          {found.map((model) => (
            <Row key={model.name} name={model.name} about={model.about}>
              <span className={styles.size}>{formatBytes(model.size_bytes)}</span>
              <span className={styles.fits} data-fits={model.fits}>
                {FITS[model.fits]}
                {model.tokens_per_s && model.fits !== "no" ? `, about ${formatRate(model.tokens_per_s)}` : ""}
              </span>
            </Row>
          ))}
        </Rows>
      )}
      {asked && <OnHub words={asked} />}
      {models.every((model) => !model.tokens_per_s) && (
        <p className={styles.none}>
          How fast each would be is told once the memory was measured: by <code>mlxr doctor</code>, or under{" "}
          <a href={routeHref("engine")}>Engine</a>.
        </p>
      )}
    </div>
  );
}

/** What the hub has for the words; the server asks it. */
function OnHub({ words }: { words: string }) {
  const { data, error, isPending } = useHubSearch(words);
  if (isPending) return <Skeleton bare />;
  if (error) return <Notice kind="error">Hugging Face could not be searched. {describeError(error)}</Notice>;
  if (data.length === 0) return <p className={styles.none}>Hugging Face has no GGUF files for “{words}”.</p>;
  return (
    <Rows label="On Hugging Face">
      {data.map((one) => (
        <Row key={one.name} name={one.name}>
          <span className={styles.downloads}>{formatCount(one.downloads)} downloads in a month</span>
        </Row>
      ))}
    </Rows>
  );
}

function Rows({ label, children }: { label: string; children: ReactNode }) {
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a place that scrolls can be reached by the keyboard.
    <section className={styles.scroll} tabIndex={0} aria-label={label}>
      <ul>{children}</ul>
    </section>
  );
}

function Row({ name, about, children }: { name: string; about?: string; children: ReactNode }) {
  const queries = useQueryClient();
  const isPulling = useStore(pulls).some((pull) => pull.model === name && pull.state === "running");
  return (
    <li className={styles.row}>
      <div>
        <strong>{name}</strong>
        {about && <p>{about}</p>}
      </div>
      {children}
      <Button
        small
        aria-label={`Pull ${name}`}
        disabled={isPulling}
        onClick={() => void startPull(name, () => void refreshModels(queries))}
      >
        <Download aria-hidden="true" /> {isPulling ? "Pulling…" : "Pull"}
      </Button>
    </li>
  );
}
