import { apiKey, forgetKey, keyWanted } from "../api/key";
import { useStore } from "../lib/store";
import { type Theme, theme } from "../lib/theme";
import { Button } from "../ui/Button";
import { SelectField } from "../ui/SelectField";
import styles from "./SettingsView.module.css";

const THEMES: Record<Theme, string> = { system: "Like the system", light: "Light", dark: "Dark" };

export default function SettingsView(_: { detail: string }) {
  const chosen = useStore(theme);
  const key = useStore(apiKey);
  return (
    <div className={styles.settings}>
      <h1>Settings</h1>
      <SelectField label="Theme" choices={THEMES} value={chosen} onChange={theme.set} />
      <section className={styles.section} aria-labelledby="key-heading">
        <h2 id="key-heading">API key</h2>
        <p>
          {key
            ? "This browser sends a key with each request."
            : "No key is used. A server that was started with keys asks for one."}
        </p>
        <div>
          {key ? (
            <Button onClick={forgetKey}>Forget the key</Button>
          ) : (
            <Button onClick={() => keyWanted.set("offered")}>Enter a key</Button>
          )}
        </div>
      </section>
    </div>
  );
}
