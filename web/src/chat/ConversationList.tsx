import { useVirtualizer } from "@tanstack/react-virtual";
import { ChevronDown, Download, FolderInput, ListChecks, Plus, Trash2, Upload } from "lucide-react";
import { useEffect, useMemo, useRef, useState } from "react";
import { describeError } from "../api/client";
import { go, routeHref } from "../lib/route";
import { saveFile } from "../lib/save";
import { savedStore } from "../lib/saved";
import { useStore } from "../lib/store";
import { Button, IconButton } from "../ui/Button";
import { Menu, MenuItem } from "../ui/Menu";
import { Notice } from "../ui/Notice";
import { runs } from "./answering";
import styles from "./ConversationList.module.css";
import { ConversationMenu } from "./ConversationMenu";
import { FolderDialog } from "./FolderDialog";
import { groupConversations, type Line } from "./groups";
import { conversations, importWholes, readWholes, removeConversations } from "./library";
import { searchMessages } from "./storage";
import { exportJson, importJson } from "./transfer";
import type { Conversation } from "./types";

/** All conversations in groups, the last used first, with search, import and export. */
export function ConversationList({ current, onChoose }: { current: string; onChoose: () => void }) {
  const all = useStore(conversations) ?? [];
  const [wanted, setWanted] = useState("");
  const found = useFound(all, wanted.trim());
  const [selected, setSelected] = useState<ReadonlySet<string> | null>(null);
  const toggle = (id: string) => {
    const next = new Set(selected);
    if (!next.delete(id)) next.add(id);
    setSelected(next);
  };
  const startNew = () => {
    go("chat");
    onChoose();
  };
  return (
    <div className={styles.place}>
      <div className={styles.head}>
        <Button className={styles.new ?? ""} onClick={startNew}>
          <Plus /> New chat
        </Button>
        <TransferMenu all={all} onSelect={() => setSelected(new Set())} />
      </div>
      <input
        type="search"
        data-search
        className={styles.search}
        aria-label="Search the conversations"
        placeholder="Search"
        value={wanted}
        onChange={(event) => setWanted(event.target.value)}
      />
      {all.length === 0 && <p className={styles.none}>Conversations appear here.</p>}
      {all.length > 0 && found.length === 0 && <p className={styles.none}>Nothing has “{wanted.trim()}” in it.</p>}
      {selected && <SelectionBar ids={[...selected]} onEnd={() => setSelected(null)} />}
      <Rows rows={found} current={current} selected={selected} onSelect={toggle} onChoose={onChoose} />
    </div>
  );
}

const ROW = 40;
const folded = savedStore<string[]>("chat.folded", [], isNames);

function isNames(value: unknown): value is string[] {
  return Array.isArray(value) && value.every((name) => typeof name === "string");
}

interface RowsProps {
  rows: readonly Conversation[];
  current: string;
  selected: ReadonlySet<string> | null;
  onSelect: (id: string) => void;
  onChoose: () => void;
}

function Rows({ rows, current, selected, onSelect, onChoose }: RowsProps) {
  const scroll = useRef<HTMLElement>(null);
  const hidden = useStore(folded);
  const lines = useMemo(() => groupConversations(rows, new Set(hidden)), [rows, hidden]);
  const answering = new Set([...useStore(runs).values()].map((run) => run.conversation));
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW,
    overscan: 8,
    getItemKey: (index) => nameLine(lines[index], index),
  });
  return (
    <nav ref={scroll} className={styles.rows} aria-label="Conversations">
      <ul style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const line = lines[item.index];
          const style = { transform: `translateY(${item.start}px)` };
          if (line?.kind === "heading") return <Heading key={item.key} style={style} {...line} />;
          if (!line) return null;
          const row = line.conversation;
          return (
            <li key={item.key} style={style} data-current={row.id === current} data-answering={answering.has(row.id)}>
              {selected && (
                <input
                  type="checkbox"
                  aria-label={`Select “${row.title}”`}
                  checked={selected.has(row.id)}
                  onChange={() => onSelect(row.id)}
                />
              )}
              <a
                href={routeHref("chat", row.id)}
                aria-current={row.id === current ? "page" : undefined}
                title={row.title}
                dir="auto"
                onClick={onChoose}
              >
                {row.title}
                {answering.has(row.id) && <span className="hidden-text">, the model answers</span>}
              </a>
              {!selected && <ConversationMenu conversation={row} />}
            </li>
          );
        })}
      </ul>
    </nav>
  );
}

function nameLine(line: Line | undefined, index: number): string | number {
  return line?.kind === "row" ? line.conversation.id : line ? `heading ${line.title}` : index;
}

/** The heading of a group, which folds it. */
function Heading({ title, count, style }: { title: string; count: number; style: { transform: string } }) {
  const isFolded = folded.get().includes(title);
  const toggle = () => folded.set(isFolded ? folded.get().filter((name) => name !== title) : [...folded.get(), title]);
  return (
    <li className={styles.group} style={style}>
      <button type="button" aria-expanded={!isFolded} onClick={toggle}>
        <ChevronDown aria-hidden="true" />
        <span>{title}</span>
        <span className={styles.count}>{count}</span>
      </button>
    </li>
  );
}

/** What is done with several conversations at once. */
function SelectionBar({ ids, onEnd }: { ids: readonly string[]; onEnd: () => void }) {
  const [moving, setMoving] = useState(false);
  const remove = async () => {
    await removeConversations(ids);
    if (ids.some((id) => location.hash.endsWith(id))) go("chat");
    onEnd();
  };
  return (
    <div className={styles.selection}>
      <span role="status">{ids.length} selected</span>
      <IconButton
        small
        label="Move the selected to a folder"
        disabled={ids.length === 0}
        onClick={() => setMoving(true)}
      >
        <FolderInput />
      </IconButton>
      <IconButton small label="Delete the selected" disabled={ids.length === 0} onClick={() => void remove()}>
        <Trash2 />
      </IconButton>
      <Button small kind="quiet" onClick={onEnd}>
        Done
      </Button>
      <FolderDialog open={moving} ids={ids} onClose={() => setMoving(false)} />
    </div>
  );
}

/** After the last letter was typed. */
const WAIT_MS = 30;

/** The conversations with a text in their title, and a moment later also those with it in a message. */
function useFound(all: readonly Conversation[], wanted: string): readonly Conversation[] {
  const [inside, setInside] = useState<{ wanted: string; ids: ReadonlySet<string> }>({ wanted: "", ids: new Set() });
  useEffect(() => {
    if (wanted.length < 2) return;
    const controller = new AbortController();
    const timer = setTimeout(async () => {
      const ids = await searchMessages(wanted, controller.signal).catch(() => new Set<string>());
      if (!controller.signal.aborted) setInside({ wanted, ids });
    }, WAIT_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [wanted]);
  return useMemo(() => {
    if (wanted === "") return all;
    const lower = wanted.toLowerCase();
    const ids = inside.wanted === wanted ? inside.ids : new Set<string>();
    return all.filter((one) => one.title.toLowerCase().includes(lower) || ids.has(one.id));
  }, [all, wanted, inside]);
}

function TransferMenu({ all, onSelect }: { all: readonly Conversation[]; onSelect: () => void }) {
  const input = useRef<HTMLInputElement>(null);
  const [told, setTold] = useState<{ kind: "good" | "error"; text: string } | null>(null);
  const importFile = async (file: File | undefined) => {
    if (!file) return;
    try {
      const wholes = importJson(await file.text());
      await importWholes(wholes);
      setTold({
        kind: "good",
        text: `Imported ${wholes.length === 1 ? "1 conversation" : `${wholes.length} conversations`}.`,
      });
    } catch (error) {
      setTold({ kind: "error", text: describeError(error) });
    }
  };
  const exportAll = async () => saveFile("conversations.json", exportJson(await readWholes(all)), "application/json");
  return (
    <>
      <input
        ref={input}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File of conversations"
        onChange={(event) => {
          void importFile(event.target.files?.[0]);
          event.target.value = "";
        }}
      />
      <Menu label="Import, export, select" small={false}>
        <MenuItem onSelect={() => input.current?.click()}>
          <Upload /> Import a file
        </MenuItem>
        <MenuItem onSelect={() => void exportAll()} disabled={all.length === 0}>
          <Download /> Export all
        </MenuItem>
        <MenuItem onSelect={onSelect} disabled={all.length === 0}>
          <ListChecks /> Select several
        </MenuItem>
      </Menu>
      {told && (
        <div className={styles.told}>
          <Notice
            kind={told.kind}
            actions={
              <Button small kind="quiet" onClick={() => setTold(null)}>
                Close
              </Button>
            }
          >
            {told.text}
          </Notice>
        </div>
      )}
    </>
  );
}
