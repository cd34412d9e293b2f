import { useState } from "react";
import { describeError } from "../api/client";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { CheckField, Field } from "../ui/Field";
import { Notice } from "../ui/Notice";
import { SelectField } from "../ui/SelectField";
import { listMcpTools, type McpServers, type McpTool, mcpKeys } from "./mcp";
import styles from "./ToolsSettings.module.css";

interface Props {
  servers: McpServers;
  onAdd: (server: string, tools: McpTool[]) => void;
  onClose: () => void;
}

const OTHER = "";

/** Chooses an MCP server and which of its tools the model may call. */
export function McpDialog({ servers, onAdd, onClose }: Props) {
  const listed = [...servers.commands, ...servers.urls.filter((url) => url !== "*")];
  const [chosen, setChosen] = useState(listed[0] ?? OTHER);
  const [address, setAddress] = useState("");
  const keys = useStore(mcpKeys);
  const [tools, setTools] = useState<McpTool[] | null>(null);
  const [left, setLeft] = useState<ReadonlySet<string>>(new Set());
  const [error, setError] = useState<string | null>(null);
  const [asking, setAsking] = useState(false);
  const server = chosen === OTHER ? address.trim() : chosen;
  const forget = () => {
    setTools(null);
    setError(null);
  };
  const ask = async () => {
    setAsking(true);
    forget();
    try {
      setTools(await listMcpTools(server));
      setLeft(new Set());
    } catch (reason) {
      setError(describeError(reason));
    }
    setAsking(false);
  };
  const wanted = (tools ?? []).filter((tool) => !left.has(tool.name));
  const submit = () => {
    if (tools === null) void ask();
    else {
      onAdd(server, wanted);
      onClose();
    }
  };
  if (listed.length === 0 && servers.urls.length === 0)
    return (
      <Dialog open title="Connect an MCP server" onClose={onClose}>
        <p>
          The owner of this server allows none yet. Start it with <code>--mcp-commands NAME=COMMAND</code> for a program
          on its machine, or with <code>--mcp-urls ADDRESS</code>; <code>*</code> stands for every public address.
        </p>
      </Dialog>
    );
  return (
    <Dialog open title="Connect an MCP server" onClose={onClose}>
      <DialogForm onSubmit={submit}>
        <SelectField
          label="Server"
          choices={{
            ...Object.fromEntries(listed.map((one) => [one, one])),
            ...(servers.urls.includes("*") && { [OTHER]: "Another address" }),
          }}
          value={chosen}
          onChange={(value) => {
            setChosen(value);
            forget();
          }}
        />
        {chosen === OTHER && (
          <Field label="Address of the server" hint="Its address for Streamable HTTP, which often ends in /mcp.">
            {(ids) => (
              <input
                {...ids}
                type="url"
                value={address}
                placeholder="https://example.com/mcp"
                onChange={(event) => {
                  setAddress(event.target.value);
                  forget();
                }}
              />
            )}
          </Field>
        )}
        {server.includes("://") && (
          <Field label="Key" hint="If the server wants one. It stays in this browser.">
            {(ids) => (
              <input
                {...ids}
                type="password"
                autoComplete="off"
                value={keys[server] ?? ""}
                onChange={(event) => mcpKeys.set({ ...keys, [server]: event.target.value })}
              />
            )}
          </Field>
        )}
        {error && <Notice kind="error">{error}</Notice>}
        {tools && (
          <fieldset className={styles.mcp}>
            <legend>Tools</legend>
            {tools.length === 0 && <p>This server has none.</p>}
            {tools.map((tool) => (
              <div key={tool.name}>
                <CheckField
                  label={tool.name}
                  checked={!left.has(tool.name)}
                  onChange={(checked) => {
                    const next = new Set(left);
                    if (checked) next.delete(tool.name);
                    else next.add(tool.name);
                    setLeft(next);
                  }}
                />
                {tool.description && <p>{tool.description}</p>}
              </div>
            ))}
          </fieldset>
        )}
        <Button
          kind="primary"
          type="submit"
          disabled={asking || server === "" || (tools !== null && wanted.length === 0)}
        >
          {asking ? "Connects…" : tools === null ? "Show its tools" : `Add ${wanted.length} of ${tools.length} tools`}
        </Button>
      </DialogForm>
    </Dialog>
  );
}
