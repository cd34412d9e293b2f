import { Check, ChevronDown } from "lucide-react";
import { Popover } from "radix-ui";
import { type KeyboardEvent, useEffect, useId, useRef, useState } from "react";
import { type ListedModel, shortName, useListedModels, useLoadedModels, useServerInfo } from "../api/manage";
import { isDemo, nameModel, useModels, writes } from "../api/models";
import { useCommand } from "../lib/commands";
import { formatBytes, formatCount } from "../lib/format";
import { routeHref } from "../lib/route";
import { usePortalHost } from "../ui/portal";
import styles from "./ModelPicker.module.css";

interface Props {
  id?: string;
  value: string;
  onChange: (model: string) => void;
}

interface Choice {
  /** What is chosen; "" is the server's default. */
  value: string;
  name: string;
  facts: string;
  isLoaded: boolean;
}

/** Chooses the model by name, size, context and whether it is loaded. One that is gone stays, marked. */
export function ModelPicker({ id, value, onChange }: Props) {
  const [open, setOpen] = useState(false);
  const host = usePortalHost();
  const { choices, label } = useChoices(value);
  useCommand("model", () => {
    if (id === undefined) setOpen(true);
  });
  const choose = (model: string) => {
    onChange(model);
    setOpen(false);
  };
  const isLoaded = choices.find((choice) => choice.value === value)?.isLoaded ?? false;
  return (
    <Popover.Root open={open} onOpenChange={setOpen}>
      <Popover.Trigger asChild>
        <button type="button" id={id} className={styles.trigger} aria-label={`Model: ${label}`} data-value={value}>
          <span className={styles.dot} data-loaded={isLoaded} aria-hidden="true" />
          <span className={styles.label}>{label}</span>
          <ChevronDown aria-hidden="true" />
        </button>
      </Popover.Trigger>
      <Popover.Portal container={host}>
        <Popover.Content className={styles.panel ?? ""} align="start" sideOffset={4} collisionPadding={8}>
          <Choices choices={choices} value={value} onChoose={choose} />
          <a className={styles.manage} href={routeHref("models")} onClick={() => setOpen(false)}>
            Manage models
          </a>
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}

/** A field that filters, and the models below it; the arrow keys and Enter choose. */
function Choices({ choices, value, onChoose }: { choices: Choice[]; value: string; onChoose: (v: string) => void }) {
  const list = useId();
  const [words, setWords] = useState("");
  const found = choices.filter(({ name }) => name.toLowerCase().includes(words.trim().toLowerCase()));
  const [at, setAt] = useState(() =>
    Math.max(
      0,
      choices.findIndex((choice) => choice.value === value),
    ),
  );
  const active = Math.min(at, found.length - 1);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    box.current?.children[active]?.scrollIntoView({ block: "nearest" });
  }, [active]);
  const press = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined) setAt(Math.max(0, Math.min(found.length - 1, active + step)));
    else if (event.key === "Enter" && found[active]) onChoose(found[active].value);
    else return;
    event.preventDefault();
  };
  return (
    <>
      <input
        type="search"
        role="combobox"
        className={styles.search}
        aria-label="Search the models"
        aria-expanded="true"
        aria-controls={list}
        aria-activedescendant={found[active] && `${list}-${active}`}
        placeholder="Search the models"
        value={words}
        onChange={(event) => {
          setWords(event.target.value);
          setAt(0);
        }}
        onKeyDown={press}
      />
      <div ref={box} id={list} role="listbox" aria-label="Models" className={styles.list}>
        {found.map((choice, index) => (
          // biome-ignore lint/a11y/useKeyWithClickEvents: the field above has the keyboard, as of every list box.
          <div
            key={choice.value}
            id={`${list}-${index}`}
            role="option"
            tabIndex={-1}
            aria-selected={choice.value === value}
            data-active={index === active}
            onPointerMove={() => setAt(index)}
            onClick={() => onChoose(choice.value)}
          >
            <span className={styles.dot} data-loaded={choice.isLoaded} aria-hidden="true" />
            <span className={styles.what}>
              <span className={styles.name}>{choice.name}</span>
              <span className={styles.facts}>{choice.facts}</span>
            </span>
            {choice.value === value && <Check aria-hidden="true" />}
          </div>
        ))}
      </div>
      {found.length === 0 && <p className={styles.none}>No model has “{words.trim()}” in its name.</p>}
    </>
  );
}

function useChoices(value: string): { choices: Choice[]; label: string } {
  const models = useModels().data;
  const listed = useListedModels().data ?? [];
  const loaded = new Set((useLoadedModels().data ?? []).map((one) => shortName(one.name)));
  const usual = useServerInfo().data?.default_model ?? "";
  const known = new Map(listed.map((one) => [shortName(one.name), one]));
  const make = (id: string, name: string, chosen = id): Choice => {
    const isLoaded = loaded.has(shortName(id));
    return { value: chosen, name, isLoaded, facts: describe(known.get(shortName(id)), isLoaded) };
  };
  const ids = (models ?? []).filter((model) => writes(model) || model.id === value).map((model) => model.id);
  const own = ids.filter((id) => !isDemo(id));
  const first = make(usual, usual ? `${nameModel(usual)} (default)` : "Default model", "");
  const others = [...own, ...ids.filter(isDemo)].filter((id) => id !== shortName(usual) || id === value);
  const rest = others.map((id) => make(id, nameModel(id)));
  const isGone = value !== "" && models !== undefined && !ids.includes(value);
  const gone = isGone ? [{ ...make(value, `${value} (not here)`), facts: "Pull it again or choose another one" }] : [];
  const choices = [first, ...rest, ...gone];
  return { choices, label: choices.find((choice) => choice.value === value)?.name ?? nameModel(value) };
}

/** Size, quantization, context and state of a model, in one line. */
function describe(model: ListedModel | undefined, isLoaded: boolean): string {
  const facts = model
    ? [
        formatBytes(model.size),
        model.details.quantization_level,
        `${formatCount(model.details.context_length)} context`,
        model.has_chat_template ? "" : "base, no chat",
      ]
    : [];
  return [...facts, isLoaded ? "loaded" : ""].filter(Boolean).join(" · ");
}
