import { Pencil, Plug, Plus, Trash2 } from "lucide-react";
import { useState } from "react";
import { Button, IconButton } from "../ui/Button";
import { CheckField, Field } from "../ui/Field";
import { SelectField } from "../ui/SelectField";
import { BUILT_IN_TOOLS, hasBuiltIn, SCRIPT } from "./builtInTools";
import { McpDialog } from "./McpDialog";
import { addMcpTools, labelServer, useMcpServers } from "./mcp";
import { readTools, type ToolDefinition } from "./settings";
import { TextSetting } from "./TextSetting";
import { ToolDialog } from "./ToolDialog";
import styles from "./ToolsSettings.module.css";
import { readForm, type ToolForm } from "./toolForm";
import { readUrl } from "./tools";
import type { Settings, ToolServer, ToolUrl } from "./types";

const CHOICES: Record<Settings["toolChoice"], string> = {
  auto: "Auto",
  required: "Required",
  none: "None",
};

const EXAMPLE = `[{
  "name": "get_weather",
  "description": "The weather of a city",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}]`;

/** The tools that the model may call, and who answers the calls. */
export function ToolsSettings({
  settings,
  onChange,
}: {
  settings: Settings;
  onChange: (part: Partial<Settings>) => void;
}) {
  const [edited, setEdited] = useState<ToolForm | null>(null);
  const [connecting, setConnecting] = useState(false);
  const servers = useMcpServers().data;
  const read = readTools(settings.tools);
  const tools = typeof read === "string" ? [] : read;
  const isBuiltIn = (tool: ToolDefinition) => BUILT_IN_TOOLS.some((one) => isSame(one.definition, tool));
  const own = tools.filter((tool) => !isBuiltIn(tool));
  const write = (next: readonly ToolDefinition[]) =>
    onChange({ tools: next.length > 0 ? JSON.stringify(next, null, 2) : "" });
  const setUrl = (name: string, url: ToolUrl) => onChange({ toolUrls: { ...settings.toolUrls, [name]: url } });
  const setServer = (name: string, server: ToolServer) =>
    onChange({ toolServers: { ...settings.toolServers, [name]: server } });
  const save = (tool: ToolDefinition) => {
    const at = tools.findIndex((one) => one.function.name === edited?.name);
    write(at < 0 ? [...tools, tool] : tools.map((one, index) => (index === at ? tool : one)));
  };
  return (
    <section className={styles.tools} aria-label="Tools and who answers them">
      <h3>Tools</h3>
      {typeof read !== "string" && (
        <>
          <div>
            {BUILT_IN_TOOLS.map(({ label, definition }) => (
              <CheckField
                key={label}
                label={label}
                checked={tools.some((tool) => isSame(tool, definition))}
                onChange={(checked) =>
                  write(checked ? [...tools, definition] : tools.filter((tool) => !isSame(tool, definition)))
                }
              />
            ))}
            {hasBuiltIn(settings.tools, SCRIPT.definition) && (
              <CheckField
                label="Run JavaScript without asking me"
                checked={settings.runsScripts ?? false}
                onChange={(runsScripts) => onChange({ runsScripts })}
              />
            )}
          </div>
          {own.map((tool) => (
            <OwnTool
              key={tool.function.name}
              tool={tool}
              url={settings.toolUrls[tool.function.name]}
              server={settings.toolServers?.[tool.function.name]}
              onUrl={(url) => setUrl(tool.function.name, url)}
              onServer={(server) => setServer(tool.function.name, server)}
              onEdit={setEdited}
              onRemove={() => write(tools.filter((one) => one !== tool))}
            />
          ))}
          <div className={styles.add}>
            <Button onClick={() => setEdited({ name: "", description: "", parameters: [] })}>
              <Plus /> Add a tool
            </Button>
            <Button onClick={() => setConnecting(true)} disabled={!servers}>
              <Plug /> Connect an MCP server
            </Button>
          </div>
        </>
      )}
      {edited && (
        <ToolDialog
          form={edited}
          taken={tools.map((tool) => tool.function.name).filter((name) => name !== edited.name)}
          onSave={save}
          onClose={() => setEdited(null)}
        />
      )}
      {connecting && servers && (
        <McpDialog
          servers={servers}
          onAdd={(server, chosen) => onChange(addMcpTools(settings, server, chosen))}
          onClose={() => setConnecting(false)}
        />
      )}
      {tools.length > 0 && (
        <SelectField
          label="Tool choice"
          choices={CHOICES}
          value={settings.toolChoice}
          onChange={(toolChoice) => onChange({ toolChoice })}
        />
      )}
      <details className={styles.json} open={typeof read === "string" || undefined}>
        <summary>Tools as JSON</summary>
        <TextSetting
          label="List of tools"
          hint="Functions as OpenAI's clients send them."
          rows={6}
          code
          placeholder={EXAMPLE}
          check={(text) => {
            const checked = readTools(text);
            return typeof checked === "string" ? checked : null;
          }}
          value={settings.tools}
          onChange={(text) => onChange({ tools: text })}
        />
      </details>
    </section>
  );
}

function isSame(a: ToolDefinition, b: ToolDefinition): boolean {
  return JSON.stringify(a) === JSON.stringify(b);
}

interface OwnProps {
  tool: ToolDefinition;
  url: ToolUrl | undefined;
  server: ToolServer | undefined;
  onServer: (server: ToolServer) => void;
  onUrl: (url: ToolUrl) => void;
  onEdit: (form: ToolForm) => void;
  onRemove: () => void;
}

/** A tool of the person's own: what it is, who answers it, and what changes it. */
function OwnTool({ tool, url, server, onUrl, onServer, onEdit, onRemove }: OwnProps) {
  const { name, description } = tool.function;
  const form = readForm(tool);
  return (
    <div className={styles.own}>
      <div className={styles.head}>
        <code>{name}</code>
        {form && !server && (
          <IconButton small label={`Edit ${name}`} onClick={() => onEdit(form)}>
            <Pencil />
          </IconButton>
        )}
        <IconButton small label={`Remove ${name}`} onClick={onRemove}>
          <Trash2 />
        </IconButton>
      </div>
      {description && <p>{description}</p>}
      {server ? (
        <CheckField
          label={`Call ${labelServer(server.server)} without asking me`}
          checked={server.allowed}
          onChange={(allowed) => onServer({ ...server, allowed })}
        />
      ) : (
        <UrlField name={name} value={url} onChange={onUrl} />
      )}
    </div>
  );
}

interface UrlProps {
  name: string;
  value: ToolUrl | undefined;
  onChange: (url: ToolUrl) => void;
}

/** The address that may get a tool's calls. Writing it allows it; calls go there by themselves only if that is ticked. */
function UrlField({ name, value = { url: "", automatic: false }, onChange }: UrlProps) {
  const read = value.url ? readUrl(value.url) : null;
  return (
    <div className={styles.url}>
      <Field
        label={`Address that answers ${name}`}
        hint="It gets the arguments as a POST of JSON, and answers with the result. Empty: you type the result."
        error={typeof read === "string" ? read : null}
      >
        {(ids) => (
          <input
            {...ids}
            type="url"
            placeholder="http://127.0.0.1:9000/tool"
            value={value.url}
            onChange={(event) => onChange({ url: event.target.value.trim(), automatic: false })}
          />
        )}
      </Field>
      {value.url && typeof read !== "string" && (
        <CheckField
          label="Send calls there without asking me"
          checked={value.automatic}
          onChange={(automatic) => onChange({ ...value, automatic })}
        />
      )}
    </div>
  );
}
